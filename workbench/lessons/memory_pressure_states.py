"""The state that lesson 24 starts from: experts of two sizes in an arena, slots that change hands, a run on a card that fills up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench import models, moe, paths
from workbench.devices.simulated import simulated_machine
from workbench.errors import AllocationError, StorageError
from workbench.expertflow.control import Answer, Controller
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.fragments import Arena, Failure, churn
from workbench.expertflow.monitor import Monitor, Pressure, Reading
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import expert_bytes, offload
from workbench.expertflow.pool import FRESH, ExpertPool, Slot
from workbench.expertflow.precision import LayerError, storage_errors
from workbench.expertflow.replay import replay
from workbench.expertflow.visits import expert_weights

MIB = 2**20
CELL = 3_840
"""Bytes of a cell in the map of the arena: an f16 expert takes 32, a q8_0 expert 17."""
CARD = "rtx3090-pcie4"
JOINS, LEAVE, TOKENS = (7, 15, 23, 31, 39, 47), 50, 72
"""At which token other conversations open their caches, when all of them end, and how many tokens ours has."""


class Crowd(NamedTuple):
    """A run on a card that others fill: logits of each token, the monitor's readings, what was answered, how the run ended."""

    logits: np.ndarray
    readings: list[Reading]
    answers: list[Answer]
    slots: list[int]
    error: str
    demand: list[tuple[int, dict[str, int]]]


class Watched(NamedTuple):
    """A recorded demand under another monitor: readings, bytes above the limit at the worst moment, time of readings, answers
    (reading, part, what, slots), and the mean number of slots."""

    readings: list[Reading]
    overshoot: int
    spent: int
    answers: list[tuple[int, str, int]]
    slots: float


class Lesson24:
    """Memory pressure: the tiny Mixtral in three storage types, and a card of 9 MiB that does not hold everything."""

    limit = 9 * MIB
    prompt = "And God said unto Moses, Go in unto"

    @cached_property
    def model(self) -> models.Model:
        """The tiny Mixtral, experts in f16."""
        return models.load("tiny-mixtral-f16")

    @cached_property
    def trace(self) -> moe.RouteTrace:
        """The recorded routes of the tiny Mixtral."""
        return moe.RouteTrace.load(paths.models_dir() / "traces" / "tiny-mixtral_trace.npz")

    # ---- 1 and 2: an arena

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Bytes of one expert by storage type, from the three shipped files."""
        out = {}
        for kind in ("f16", "q8_0", "q4_0"):
            with models.load(f"tiny-mixtral-{kind}") as model:
                out[kind] = expert_bytes(model) // (len(model.hparams.moe_layers) * model.hparams.n_expert)
        return out

    def sizes(self, mixed: bool = True) -> dict[int, int]:
        """Bytes of each expert (its layer * 8 + its number): all f16, or, mixed, q8_0 in every second layer."""
        return {key: self.kinds["q8_0" if mixed and key // 8 % 2 else "f16"] for key in range(48)}

    def keys(self, n_tokens: int) -> Iterator[int]:
        """The experts that the first tokens of the trace want, layer after layer."""
        for t in range(n_tokens):
            for layer, ids in enumerate(self.trace.experts):
                yield from (layer * 8 + int(e) for e in ids[t])

    def churned(self, slots: int, n_tokens: int = 256, mixed: bool = True) -> tuple[int, int, list[Failure]]:
        """Experts in an arena as large as `slots` f16 experts: (accesses, hits, failures)."""
        access = hits = 0
        failures, before = list[Failure](), set[object]()
        for key, arena, failure in churn(self.keys(n_tokens), self.sizes(mixed), slots * self.kinds["f16"]):
            access += 1
            if key in before:
                hits += 1
            else:
                before = set(arena.places)
            failures += [failure] if failure else []
        return access, hits, failures

    def slotted(self, slots: int, n_tokens: int = 256) -> tuple[int, int, int]:
        """The same accesses and bytes with slots of two sizes: (accesses, hits, bytes of all slots)."""
        by_layer = [self.kinds["q8_0" if layer % 2 else "f16"] for layer in range(6)]
        share = slots * self.kinds["f16"] // sum(self.kinds[k] for k in ("f16", "q8_0"))  # as many of each size
        counts = {self.kinds[k]: share for k in ("f16", "q8_0")}
        found = replay(self.trace.select(np.arange(n_tokens)), "lru", counts, "global", sizes=by_layer)
        return sum(found.accesses), sum(found.hits), share * sum(counts)

    def hole_steps(self, slots: int = 8, most: int = 60) -> dict[str, Any]:
        """The arena, access by access, up to the second failure: a map of its bytes."""
        steps, shown, n_failed = list[dict[str, Any]](), dict[object, tuple[int, int]](), 0
        for access, (key, arena, failure) in enumerate(churn(self.keys(most), self.sizes(), slots * self.kinds["f16"])):
            gone = {k: v for k, v in shown.items() if arena.places.get(k) != v}
            new = key not in shown or key in gone
            marks = [[c, "", "", -1, False] for place in gone.values() for c in _cells(place)]
            if new:
                marks += [[c, str(key % 8), "", key // 8, False] for c in _cells(arena.places[key])]
            shown = dict(arena.places)
            name = f"expert {key % 8} of layer {key // 8}"
            out = ", ".join(f"{k % 8} of layer {k // 8}" for k in gone)  # type: ignore[operator]
            size = self.sizes()[key]
            if failure is not None:
                cause = "failure"
                said = (f"{name} needs {size:,} bytes. {failure.free:,} are free, but the largest hole has {failure.largest:,}: "
                        f"{failure.evicted} more must go. Gone: {out}.")  # fmt: skip
            elif not new:
                cause, said = "hit", f"{name} is there."
            else:
                cause = "evict" if gone else "load"
                said = f"{name} gets {size:,} bytes at {arena.places[key][0]:,}." + (f" Gone: {out}." if gone else "")
            holes = [[f"{a:,}", f"{n:,}"] for a, n in arena.holes]
            then = [["free before", f"{failure.free:,}"], ["largest before", f"{failure.largest:,}"]] if failure else []
            steps.append({"label": str(access), "cause": cause, "change": failure is not None, "sentence": said[0].upper() + said[1:],
                          "marks": marks, "table": [*then, *holes, ["free now", f"{arena.free:,}"]]})  # fmt: skip
            n_failed += failure is not None
            if n_failed == 2:
                break
        n = slots * self.kinds["f16"]
        return {"title": f"An arena of {n:,} bytes", "kind": "memory", "unit": CELL, "per_row": 16, "cells": [""] * (n // CELL),
                "steps": steps, "legend": [[i, f"layer {i}"] for i in range(6)], "columns": ["hole at", "bytes"],
                "table": "holes"}  # fmt: skip

    def arena(self, capacity: int, places: list[tuple[int, int]]) -> Arena:
        """An arena in which (offset, bytes) are taken: filled from the start, and what is not wanted taken out again."""
        arena, at = Arena(capacity, 1), 0
        for offset, size in sorted(places):
            if offset > at:
                arena.place(("hole", at), offset - at)
            arena.place(("taken", offset), size)
            at = offset + size
        for what in [w for w in arena.places if isinstance(w, tuple) and w[0] == "hole"]:
            arena.release(what)
        return arena

    # ---- 3: slots change hands

    def tenants(self, scrub: bool = False) -> list[tuple[str, str, str, str]]:
        """One slot, two experts: (moment, tag, whose bytes lie at the address, what the product that wants expert 3 is told)."""
        card = simulated_machine(CARD, offload_min_batch=1)[0]
        weights = {0: expert_weights(self.model)[0]}
        pool, rows = ExpertPool(card, weights, 2 * self.kinds["f16"], scrub=scrub), []
        view = pool.view(weights[0][0])
        assert view is not None
        slot = pool.load(0, 3)
        table = {3: (slot, slot.load)}
        card.synchronize()

        def note(moment: str) -> None:
            view.bind(table, None)
            try:
                view.expert(3, slice(0, 1), np.empty(4096, np.float32))
                told = "its own bytes"
            except StorageError as error:
                told = str(error).splitlines()[0]
            tag = "none" if slot.tag is None else f"layer {slot.tag[0]}, expert {slot.tag[1]}, load {slot.tag[2]}"
            rows.append((moment, tag, self._whose(slot, pool), told))

        note("expert 3 was loaded")
        pool.evict(0, 3)
        card.synchronize()
        note("evicted")
        for other in (5, 6):  # one goes to the other slot, one into this
            if pool.load(0, other) is slot:
                card.synchronize()
                note(f"expert {other} was loaded here")
                pool.evict(0, other)
                card.synchronize()
                break
        if pool.load(0, 3) is slot:
            card.synchronize()
            note("expert 3 came back")
        pool.close()
        return rows

    def _whose(self, slot: Slot, pool: ExpertPool) -> str:
        weight, there = pool.weights[0][0], slot.buffer.device_bytes()
        if (there == FRESH).all():
            return "0xFF, nobody's"
        data = weight.require_data().host_bytes()
        found = [e for e in range(8) if np.array_equal(there[: weight.nb[2]], data[weight.offset + e * weight.nb[2] :][: weight.nb[2]])]
        return f"those of expert {found[0]}" if found else "no expert's"

    # ---- 4: the account

    def parts(self, budget: float) -> dict[str, tuple[int, int]]:
        """Bytes on the card by part with this share of the experts: (by formula, as the run has them)."""
        with offload(self.model, budget, n_ctx=256, n_batch=64, backends=CARD) as run:
            run.session.decode(self.model.tokenizer.encode(self.prompt))
            found = run.memory()
        hp, kept = self.model.hparams, sum(t.nbytes for t in self.model.weights.values()) - expert_bytes(self.model)
        k, v = (int(self.model.weight(f"attn_{what}", 0).ne[1]) for what in "kv")
        predicted = {"weights": kept - self.model.weights["token_embd.weight"].nbytes,
                     "cache": int(budget * expert_bytes(self.model) + 0.5) // self.kinds["f16"] * self.kinds["f16"],
                     "kv": hp.n_layer * 256 * (k + v) * 4}  # fmt: skip
        return {part: (predicted.get(part, found[part]), found[part]) for part in found if found[part]}

    # ---- 5 and 6: a card that fills up

    @lru_cache(maxsize=4)  # noqa: B019 — one lesson, a few runs
    def crowd(self, control: bool = True, period: int = 2_000_000) -> Crowd:
        """72 tokens of our text on a card of 9 MiB, with 75 % of the experts in slots, while other conversations open caches of their own
        (real ones, for 256 cells) and all end at token 50. Without control nothing gives way."""
        backends, others, error = simulated_machine(CARD, self.limit, offload_min_batch=1), list[models.KVCache](), ""
        forecast, card = Forecaster.of_gates(Gates.of(self.model), 2), backends[0].buffer_type
        with offload(self.model, 0.75, policy="predicted", forecast=forecast, n_ctx=256, n_batch=64, backends=backends) as run:
            watch, logits, slots = Controller(run, self.limit, period), [], []
            demand = list[tuple[int, dict[str, int]]]()
            token = self.model.tokenizer.encode(self.prompt)
            for i in range(TOKENS):
                try:
                    others += [models.KVCache(self.model.hparams, 256, card)] if i in JOINS else []
                except AllocationError as refused:
                    error = f"token {i}: {str(refused).splitlines()[0]}"
                    break
                while i >= LEAVE and others:
                    others.pop().close()
                more = {"kv": sum(c.nbytes for c in others)}
                demand.append((card.now, {**run.memory(), "kv": run.memory()["kv"] + more["kv"]}))
                if control:
                    watch.step(more)
                logits.append(run.session.decode(token))
                token = [int(logits[-1].argmax())]
                slots.append(run.engine.pool.n_slots(0))
            for cache in others:
                cache.close()
        return Crowd(np.array(logits), watch.monitor.readings, watch.answers, slots, error, demand)

    @cached_property
    def resident_logits(self) -> np.ndarray:
        """The same text with all experts in memory."""
        with models.Session(self.model, 256) as session:
            logits = [session.decode(self.model.tokenizer.encode(self.prompt))]
            for _ in range(TOKENS - 1):
                logits.append(session.decode([int(logits[-1].argmax())]))
        return np.array(logits)

    def watched(self, period: int, high: float = 0.9, low: float = 0.7, calm: int = 3, reserved: bool = False,
                cost: int = 50_000) -> Watched:  # fmt: skip
        """The demand of `crowd` under another monitor and other marks. reserved: read as memory that an allocator keeps once it has it."""
        monitor, slots, size, top = Monitor(self.limit, period, cost), 36, self.kinds["f16"], 0.0
        pressure = Pressure({"cache": 0.5}, {"cache": 36.0}, {"cache": 2}, {"cache": 36.0}, high, low, calm=calm)
        answers, held, readings = list[tuple[int, str, int]](), list[int](), list[Reading]()
        for i, (time, parts) in enumerate(self.crowd().demand):
            for part, nbytes in parts.items():
                monitor.account(part, slots * size if part == "cache" else nbytes)
            top = max(top, monitor.used / self.limit)
            reading = monitor.look(time)
            if reading is not None:
                reading = reading._replace(ratio=top) if reserved else reading
                readings.append(reading)
                answer = pressure.answer(reading, {"cache": slots * size}, self.limit)
                if answer is not None:
                    slots = int(answer[2])
                    answers.append((i, answer[1], slots))
                    monitor.account("cache", slots * size)
            held.append(slots)
        return Watched(readings, monitor.overshoot, monitor.spent, answers, float(np.mean(held)))

    def said(self, ratios: list[float], high: float, low: float, calm: int) -> list[str]:
        """What `Pressure` answers to these readings where one part can give way, and far."""
        pressure = Pressure({}, {"cache": 1e9}, {"cache": 1.0}, {"cache": 1e9}, high, low, calm=calm)
        found = [pressure.answer(Reading(0, {}, ratio), {}, 1) for ratio in ratios]
        return [answer[1] if answer else "" for answer in found]

    def given_back(self, n: int) -> list[tuple[str, int, int]]:
        """`n` slots less, on a real (simulated) card: (moment, bytes in use on the card, what a caching allocator would report)."""
        backends, rows, top = simulated_machine(CARD, self.limit, offload_min_batch=1), list[tuple[str, int, int]](), 0
        card: Any = backends[0].buffer_type
        with offload(self.model, 0.75, n_ctx=256, n_batch=64, backends=backends) as run:
            for moment, change in (("36 slots", 0), (f"{n} slots given back", -n), (f"{n} slots taken again", n)):
                if change:
                    run.engine.resize(0, change)
                top = max(top, card.used)
                rows.append((moment, card.used, top))
        return rows

    # ---- 7: fewer bits

    def errors(self, kind: str) -> list[LayerError]:
        """What storing the experts in fewer bits costs, layer by layer, over 64 tokens of English."""
        tokens = self.model.tokenizer.encode((paths.models_dir() / "samples" / "english.txt").read_text("utf-8")[:400])[:64]
        with models.load(f"tiny-mixtral-{kind}") as other:
            return storage_errors(self.model, other, tokens)


def _cells(place: tuple[int, int]) -> range:
    offset, size = place
    return range(offset // CELL, -(-(offset + size) // CELL))
