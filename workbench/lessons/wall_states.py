"""The state that lesson 20 starts from: Mixtral-8x7B by its published numbers, a card, recorded routes, a small model that moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from workbench import models, views
from workbench.expertflow import sources
from workbench.expertflow.costs import Costs, costs
from workbench.expertflow.hindcast import Row, mixtral_offloading
from workbench.expertflow.offload import offload
from workbench.expertflow.replay import replay
from workbench.expertflow.timing import Timed, simulate
from workbench.expertflow.visits import Counters
from workbench.models.described import DescribedFile
from workbench.models.fitting import Fit, fit
from workbench.moe import RouteTrace
from workbench.moe.configs import MODELS, MoEModel, model
from workbench.trace import Trace

MIXTRAL = models.HParams("llama", n_vocab=32000, n_ctx_train=32768, n_embd=4096, n_layer=32, n_head=32, n_head_kv=8, n_rot=128, n_ff=14336,
                         rms_eps=1e-5, rope_freq_base=1e6, n_expert=8, n_expert_used=2, n_ff_exp=14336, normalise=True)  # fmt: skip
"""The published numbers of Mixtral-8x7B, as the header of its GGUF file gives them."""
GIB = 2**30
CARD, RAM, LINK, VRAM_SPEED = 24 * GIB, 64 * GIB, 25.2e9, 748.8e9
"""A card of 24 GB on PCIe 4.0 x16 (preset "rtx3090-pcie4": 80 % of 31.5 and of 936 GB/s) in a host of 64 GiB."""
TEXT, FROM, N = 17, 16, 48
"""Which recorded sequence is used for times (English), from which token on, and how many."""


class Lesson20:
    """The memory wall: Mixtral-8x7B on a card of 24 GB, by numbers; the tiny Mixtral's routes; the tiny Mixtral under a budget."""

    mixtral: MoEModel = model("Mixtral-8x7B")

    @cached_property
    def published(self) -> list[MoEModel]:
        """Some published models whose figures were looked up."""
        names = ("Mixtral-8x7B", "Qwen3-30B-A3B", "gpt-oss-120b", "DeepSeek-V3")
        return [m for m in MODELS if m.name in names]

    @staticmethod
    @lru_cache(4)
    def fit(kind: str, ram: int = RAM) -> Fit:
        """Mixtral-8x7B stored as `kind` on the card, by the account of `python -m workbench fit`."""
        return fit(DescribedFile("Mixtral-8x7B", MIXTRAL, kind), CARD, ram, LINK, vram_speed=VRAM_SPEED)

    def bytes_of(self, kind: str, what: str) -> int:
        """A line of that account by the beginning of its name."""
        return next(need.nbytes for need in self.fit(kind).needs if need.what.startswith(what))

    @staticmethod
    @lru_cache(8)
    def costs(kind: str = "q8_0", device: str = "rtx3090-pcie4") -> Costs:
        """Nanoseconds of Mixtral-8x7B's layers, stored as `kind`, on a preset."""
        return costs("Mixtral-8x7B", device, kind)

    @cached_property
    def routes(self) -> RouteTrace:
        """Routes of the tiny Mixtral, which has as many experts per layer and per token as Mixtral-8x7B: 96 texts of 256 tokens."""
        return sources.load("tiny-mixtral").trace

    @cached_property
    def text(self) -> RouteTrace:
        """48 tokens in the middle of one of them."""
        start = int(np.flatnonzero(self.routes.sequences == TEXT)[0]) + FROM
        return self.routes.select(slice(start, start + N))

    def experts_met(self, n_tokens: int) -> float:
        """Different experts of a layer that the first `n_tokens` of a text have used, mean over texts and layers."""
        r = self.routes
        rows = r.experts.reshape(r.n_layers, -1, 256, r.k)[:, :, :n_tokens].reshape(r.n_layers, -1, n_tokens * r.k)
        return float(np.mean([[len(np.unique(text)) for text in layer] for layer in rows]))

    def tokens_until_all(self) -> float:
        """After how many tokens of a text all experts of a layer have been used: the median over texts and layers."""
        r, out = self.routes, []
        for layer in r.experts.reshape(r.n_layers, -1, 256, r.k):
            for text in layer:
                first = [np.argmax((text == e).any(1)) + 1 if (text == e).any() else 257 for e in range(r.n_expert)]
                out.append(max(first))
        return float(np.median(np.array(out)))

    def run(self, slots: int, kind: str = "q8_0", device: str = "rtx3090-pcie4", policy: str = "lru", record: Trace | None = None) -> Timed:
        """The 48 tokens with so many experts of each layer on the card, missing ones loaded when their layer's router has spoken."""
        found = simulate(self.text, self.costs(kind, device), policy, slots, record=record)
        assert sum(found.ledger.values()) == found.ns and found.hits <= found.accesses
        return found

    def spans(self, layers: int = 2) -> list[tuple[int, float, float, str]]:
        """What card (0) and link (1) do in the first layers of the first token, in ms."""
        record = Trace("virtual")
        self.run(2, record=record)
        rows = [(e, {k: str(v) for k, v in record.described(e).items()}) for e in record.events if e.kind == "busy"]
        end = [e.end for e, d in rows if d["stream"] == "compute" and d["name"] == "attention"][layers]
        return [(int(d["stream"] == "copy"), e.start / 1e6, e.end / 1e6, d["name"].partition(" of")[0] * ("expert" in d["name"]))
                for e, d in rows if e.start < end - 1e6]  # fmt: skip

    def formula(self, kind: str = "q8_0", misses: float | None = None, device: str = "rtx3090-pcie4") -> float:
        """Milliseconds per token when each miss is waited for; misses: experts per layer that must be loaded (default: all k)."""
        c, k = self.costs(kind, device), self.mixtral.router.n_used
        return (self.mixtral.n_moe * (c.attention(1) + c.ids(1) + k * c.expert(1) + (k if misses is None else misses) * c.load)
                + c.head(1)) / 1e6  # fmt: skip

    def resident(self, kind: str = "q8_0", device: str = "rtx3090-pcie4") -> float:
        """Milliseconds per token if all experts lay on the card: nobody waits, not even for ids."""
        c, k = self.costs(kind, device), self.mixtral.router.n_used
        return (self.mixtral.n_moe * (c.attention(1) + k * c.expert(1)) + c.head(1)) / 1e6

    def on_host(self, kind: str = "q8_0") -> float:
        """Milliseconds per token if the host computes all experts where they lie (llama.cpp's --cpu-moe)."""
        c, k = self.costs(kind), self.mixtral.router.n_used
        return (self.mixtral.n_moe * (c.attention(1) + c.ids(1) + k * c.on_host(1)) + c.head(1)) / 1e6

    @cached_property
    def mixtral_offloading(self) -> list[Row]:
        """Published speeds of on-demand loading (Eliseev and Mazur, 2-bit experts) beside one model that was fitted on two of them."""
        return [r for r in mixtral_offloading() if r.what.startswith("2-bit")]

    # ---- a run that moves real bytes

    def executed(self, slots: int, n: int = N) -> tuple[Counters, np.ndarray, RouteTrace]:
        """The tiny Mixtral decodes a recorded text with `slots` experts of each layer on a simulated card: counters, logits, routes."""
        tokens = self.routes.tokens[self.routes.sequences == TEXT][:n].tolist()
        with models.load("tiny-mixtral-f16") as m, offload(m, slots / 8, policy="lru", scope="layer", recording=True) as run:
            logits = np.stack([run.session.decode([t]) for t in tokens])
            return run.counters, logits, run.session.routes

    def undisturbed(self, n: int = N) -> np.ndarray:
        """The logits of the same text when nothing moves."""
        tokens = self.routes.tokens[self.routes.sequences == TEXT][:n].tolist()
        with models.load("tiny-mixtral-f16") as m, models.Session(m) as session:
            return np.stack([session.decode([t]) for t in tokens])

    def way(self) -> dict[str, Any]:
        """One decoded token of that run, event by event."""
        tokens, trace = self.routes.tokens[self.routes.sequences == TEXT][:6].tolist(), Trace("virtual")
        with models.load("tiny-mixtral-f16") as m, offload(m, 0.25, policy="lru", scope="layer", trace=trace) as run:
            for t in tokens[:-1]:
                run.session.decode([t])
            before = len(trace)
            run.session.decode(tokens[-1:])
            return views.token_way(trace[before:], "One token with room for two experts per layer")

    # ---- what judges the exercises

    def loads(self, experts: Sequence[Sequence[int]], slots: int) -> int:
        """Loads of one layer that keeps the experts used last in `slots` slots."""
        ids = np.array(experts)[None].astype(np.uint8)
        zero = np.zeros(ids.shape[1], np.int32)
        trace = RouteTrace(ids, np.ones(ids.shape, np.float32), np.array([0]), zero, zero, zero, 8)
        return sum(replay(trace, "lru", slots).loads)

    def tokens_to_hide(self, kind: str, device: str) -> int:
        """The fewest tokens with which an expert computes as long as another one is loaded, by asking the cost model."""
        c, n = self.costs(kind, device), 1
        while c.expert(n) < c.load:
            n *= 2
        low = n // 2
        while n - low > 1:
            middle = (low + n) // 2
            low, n = (middle, n) if c.expert(middle) < c.load else (low, middle)
        return n
