"""Whether a model fits on a card with its experts on the host, and how fast it could be at most: bytes over bandwidths.

A bound, not a forecast: nothing can decode faster than its bytes can be read. `planning` says what a scheduler makes of it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.errors import ParameterError, WorkbenchError, shown
from workbench.models.gguf import GGUFFile, open_gguf
from workbench.models.hparams import ARCHITECTURES
from workbench.models.planning import EXPERTS, WINDOW, expert_bytes, expert_layers, plan_schedule

STAND_IN = "cpu,rtx3090-pcie4"
"""Any machine with one card: bytes do not depend on its speeds."""


class Need(NamedTuple):
    """A line of the account: what, its bytes, where it lies ("card", "host" or "")."""

    what: str
    nbytes: int
    where: str


class Check(NamedTuple):
    """A question with its answer: what is needed of what there is. hard: a model with experts on the host cannot do without."""

    question: str
    holds: bool
    needed: int
    available: int
    advice: str
    hard: bool = True


class Bound(NamedTuple):
    """Most tokens per second of one way to decode, and the bytes per token over which link that come to it."""

    way: str
    tokens_per_second: float
    nbytes: float
    bandwidth: float
    over: str


@dataclass
class Fit:
    """The verdict. fits: "card" (all of it), "split" (experts on the host), or "no". notes: what could not be counted, and assumptions."""

    model: str
    architecture: str
    fits: str
    needs: list[Need]
    checks: list[Check]
    bounds: list[Bound]
    notes: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """The verdict in a sentence or two."""
        name = shown(self.model)
        unknown = " What could not be counted comes on top: see below." if any("NOT counted" in note for note in self.notes) else ""
        if self.fits == "card":
            return f"FITS: all of {name} lies on the card.{unknown}"
        lacking = {c.question: c.needed - c.available for c in self.checks if not c.holds}
        if self.fits == "split":
            slow = (
                [" It cannot pin all of them: copies from there are slow."]
                if any(q.startswith("pinned") for q in lacking)
                else []
            )
            if any(q.startswith("besides") for q in lacking):
                slow.append(
                    " The card has no room for the experts of a token: only the host can compute them when decoding."
                )
            return (f"FITS WITH EXPERTS ON THE HOST: {name} does not fit on the card as a whole, but all except its experts does, and "
                    f"the host holds these.{''.join(slow)}{unknown}")  # fmt: skip
        hard = [c for c in self.checks if not c.holds and c.hard] or [c for c in self.checks if not c.holds]
        return f"DOES NOT FIT: {'; '.join(f'{c.question}: {c.needed - c.available:,} bytes too many' for c in hard)}."


def fit(which: str | os.PathLike[str] | GGUFFile, vram: int, ram: int, link: float, *, pinned: int | None = None, context: int = 4096,
        batch: int = 512, ram_speed: float = 58e9, vram_speed: float | None = None, kv: str = "f16") -> Fit:  # fmt: skip
    """Account for a model on one card of `vram` bytes, a host of `ram` bytes and a link of `link` bytes per second.

    which: a path, the name of a shipped model, or an open file, also a `DescribedFile`, which is left open.
    pinned: bytes that the host lets be pinned (default: half of ram). ram_speed, vram_speed: bytes per second of the two memories.
    """
    for what, value in (("vram", vram), ("ram", ram), ("link", link), ("ram_speed", ram_speed)):
        if not value > 0:
            raise ParameterError(f"{what}={value!r}", "more than nothing")
    for what, value in (("batch", batch), ("context", context)):
        if not isinstance(value, int) or not 1 <= value < 2**31:
            raise ParameterError(f"{what}={value!r}", f"a whole number from 1 to {2**31 - 1:,}")
    batch = min(batch, context)
    with contextlib.ExitStack() as stack:
        file = which if isinstance(which, GGUFFile) else stack.enter_context(open_gguf(which))
        notes: list[str] = []
        layers, (experts, active) = expert_layers(file), expert_bytes(file)
        total = sum(t.nbytes for t in file.tensors.values())
        embedding = sum(t.nbytes for t in file.tensors.values() if t.name == "token_embd.weight")
        cache, compute = _measured(file, context, batch, kv, notes)
        tied = embedding if "output.weight" not in file.tensors else 0
        dense = total - experts - embedding + tied
        n_used = file.metadata.get(f"{file.architecture}.expert_used_count", 0)
        architecture = file.architecture
        if not experts:
            notes.append(
                "No merged experts: the model is dense, or keeps experts one by one. Layers can be divided with -ngl: see `schedule`."
            )
    pinned = ram // 2 if pinned is None else pinned
    fixed = dense + cache + compute
    needs = [Need("dense weights, shared experts, output", dense, "card"), Need(f"KV cache, {context:,} cells, {kv}", cache, "card"),
             Need(f"compute memory, {batch:,} tokens at once", compute, "card"),
             Need(f"experts of one token ({n_used} in each layer)", active, "card"),
             Need("all experts", experts, "host"), Need("embedding", embedding, "host")]  # fmt: skip
    checks = [
        Check("everything on the card", fixed + experts <= vram, fixed + experts, vram, "experts on the host, below", not experts),
        Check("all experts and the embedding in the host's memory", experts + embedding <= ram, experts + embedding, ram,
              f"more memory, or weights at {ram / max(experts + embedding, 1):.0%} of their bits, else they come from disk each time"),
        Check("pinned memory for all experts", experts <= pinned, experts, pinned,
              "leave them pageable; copies then go through a small pinned piece, at about a third of the speed", False),
        Check("all except the experts on the card", fixed <= vram, fixed, vram,
              "fewer cells of context, a smaller batch, or fewer layers on the card (-ngl)"),
        Check("besides, the experts of one token on the card", fixed + active <= vram, fixed + active, vram,
              "let the host compute them (--cpu-moe)", False),
    ]  # fmt: skip
    holds = [c.holds for c in checks]
    fits = "card" if holds[0] and embedding <= ram else "split" if experts and holds[1] and holds[3] else "no"
    name = which.path.name if isinstance(which, GGUFFile) else os.path.basename(os.fspath(which))
    return Fit(name, architecture, fits, needs, checks,
               _bounds(fits, dense, layers, vram - fixed, link, ram_speed, vram_speed, notes), notes)  # fmt: skip


def _measured(file: GGUFFile, context: int, batch: int, kv: str, notes: list[str]) -> tuple[int, int]:
    """Bytes of the cache and of the card's compute memory, experts on the host: as the allocator measures them."""
    if file.architecture not in ARCHITECTURES:
        notes.append(f"Architecture {shown(file.architecture)!r} has no graph builder here: compute memory is NOT counted. "
                     f"Builders: {', '.join(ARCHITECTURES)}.")  # fmt: skip
        return _plain_cache(file, context, kv, notes), 0
    plans = file.__dict__.setdefault("_plans", {})  # who turns a knob asks again and again
    key = context, batch, kv
    if key not in plans:
        plans[key] = plan_schedule(file, STAND_IN, overrides={EXPERTS: "CPU"}, context=context, batch=batch, kv=kv)
    notes += [note for note in plans[key].notes if note == WINDOW]
    card = plans[key].devices[0]
    return card.kv, card.compute


def _plain_cache(file: GGUFFile, context: int, kv: str, notes: list[str]) -> int:
    """Keys and values of plain attention, by the header."""
    try:
        layers, heads, d = (int(file.hparam(k)) for k in ("block_count", "attention.head_count", "embedding_length"))
        n_kv = int(file.hparam("attention.head_count_kv", heads))
        widths = sum(int(file.hparam(f"attention.{k}_length", d // heads)) for k in ("key", "value"))
    except (WorkbenchError, TypeError, ZeroDivisionError):
        notes.append("The header does not say how large its KV cache is: it is NOT counted.")
        return 0
    notes.append("The KV cache is counted as that of plain attention in each layer.")
    return layers * n_kv * widths * (2 if kv == "f16" else 4) * context


def _bounds(fits: str, dense: int, layers: dict[int, tuple[int, int]], room: int, link: float, ram_speed: float,
            vram_speed: float | None, notes: list[str]) -> list[Bound]:  # fmt: skip
    """Ways to decode, and how fast each could be. room: bytes of the card that are left for experts."""
    if fits == "no":
        return []
    experts, active = (sum(column) for column in zip(*layers.values(), strict=True)) if layers else (0, 0)
    notes.append("A driver and its libraries take some hundred MiB of a card besides.")
    if vram_speed is None:
        notes.append("Reading weights on the card is counted as free: --vram-speed says how fast it is.")

    def bound(way: str, read: float, speed: float, over: str, on_card: float) -> Bound:
        return Bound(way, 1 / max(read / speed + (on_card / vram_speed if vram_speed else 0.0), 1e-12), read, speed, over)

    if fits == "card":
        return [bound("all weights read on the card", dense + active, vram_speed, "memory of the card", 0.0)] if vram_speed else []
    host = "memory of the host"
    out = [bound("the host computes the experts (llama.cpp --cpu-moe)", active, ram_speed, host, dense)]
    n, there, left = 0, 0, room
    for i, (whole, used) in sorted(layers.items(), reverse=True):
        if whole > left:
            break
        n, there, left = i, there + used, left - whole
    if there:
        way = f"the same for the first {n} layers only (llama.cpp --n-cpu-moe {n})"
        out.append(bound(way, active - there, ram_speed, host, dense + there))
    if room < active:
        return out
    out.append(bound("experts are copied at each token", active, link, "link", dense))
    share = min(room / max(experts, 1), 1.0)
    way = f"{share:.0%} of the experts stay on the card, the rest is copied (routes even)"
    out.append(bound(way, active * (1 - share), link, "link", dense))
    notes.append("Real routers repeat themselves: a cache of experts can do better than with even routes. No bound counts the start "
                 "of kernels.")  # fmt: skip
    return out
