"""The state that lesson 19 starts from: experts on the host, a card that computes with them, and which of them real texts use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.cgraph import build
from workbench.devices import cost
from workbench.devices.simulated import simulated_machine
from workbench.errors import ParameterError
from workbench.lessons.run_states import RunLesson, calls
from workbench.moe import RouteTrace
from workbench.scheduler import Scheduler, WholeTensor
from workbench.scheduler.transfer import expert_copies
from workbench.scheduler.waits import Make, Ran, outcome
from workbench.tensors import Context, Flag, Tensor, Usage, ops
from workbench.trace import Trace
from workbench.views.run_data import run_data

TEXTS = ("python", "english", "c", "chinese", "maths", "numeric")
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Copied(NamedTuple):
    """One copy of a weight in a run: its name, the experts first … last (0, -1: all of it at once), bytes, and those of padding among
    them."""

    weight: str
    first: int
    last: int
    bytes: int
    padding: int


class Lesson19(RunLesson):
    """Moving only the used experts: one product with experts on the host, the tiny models on real texts, published counts."""

    pr15346 = {"tokens per second": {128: (124.24, 202.92), 256: (253.18, 372.75), 512: (502.73, 685.31), 1024: (1015.20, 1178.50),
                                     2048: (1629.92, 2089.53)},
               "used of 128 at 512 tokens, layers 0 to 7": (95, 91, 72, 74, 73, 78, 87, 95)}  # fmt: skip
    """llama.cpp pull request 15346 (August 2025), gpt-oss, experts on the host: prompt of 2,048 tokens by size of the micro-batch, before
    and after; and what a text used with its chat template."""
    kimi = {1: 16, 16: 116, 64: 263, 128: 379, 256: 478}
    """Different experts by batch, Kimi K3, 896 experts of which each token uses 16 (heyobi/LazyLora, measurement note 1.2)."""

    # ---- one product

    def product(self, ids: Sequence[Any], n_expert: int = 8, width: int = 32, before: bool = False, bias: bool = False) -> Make:
        """A run of MUL_MAT_ID on the card: a row of `ids` per token, experts of `width` × `width` f32 numbers in host memory.

        The card takes any batch. before: another node stands before it in the same split. bias: ADD_ID follows, its bias on the host.
        """
        chosen = np.array(ids, np.int32).reshape(len(ids), -1)
        n_tokens, k = chosen.shape

        def make() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
            backends = simulated_machine(1, offload_min_batch=1)
            context, rng = Context(64_000, no_alloc=True, name="experts"), np.random.default_rng(0)

            def weight(home: int, name: str, *ne: int) -> Tensor:
                t, memory = context.new_tensor("f32", *ne, name=name), backends[home].buffer_type
                t.place(memory.alloc_buffer(memory.alloc_size(t), Usage.WEIGHTS))
                return t.set(rng.standard_normal(t.shape).astype(np.float32))

            with context.active():
                experts, mixer = weight(1, "experts", width, width, n_expert), weight(0, "mixer", width, width)
                rows = context.new_tensor("i32", k, n_tokens, name="ids")
                if before:  # everything else lies on the card, so the split has no inputs before the product comes
                    memory = backends[0].buffer_type
                    rows.place(memory.alloc_buffer(memory.alloc_size(rows), Usage.WEIGHTS))
                    x = ops.reshape(ops.silu(weight(0, "x", width, n_tokens)).named("act"), width, 1, n_tokens)
                else:
                    rows.mark(Flag.INPUT)
                    x = ops.mul_mat(mixer, context.new_tensor("f32", width, 1, n_tokens, name="x").mark(Flag.INPUT)).named("mixed")
                y = ops.mul_mat_id(experts, x, rows).named("y")
                if bias:
                    y = ops.add_id(y, weight(1, "bias", width, n_expert), rows).named("z")
                graph = build(y.mark(Flag.OUTPUT))
            scheduler = Scheduler(backends)

            def run() -> Mapping[str, np.ndarray]:
                scheduler.alloc(graph)
                rows.set(chosen)
                for leaf in graph.leafs:
                    if leaf.name == "x" and leaf.flags & Flag.INPUT:
                        leaf.set(np.random.default_rng(1).standard_normal(leaf.shape).astype(np.float32))
                scheduler.compute(graph)
                return {y.name: y.numpy()}

            return scheduler, run

        return make

    def once(self, ids: Sequence[Any], **how: Any) -> Ran:
        """One recorded run of `product`."""
        return outcome(self.product(ids, **how))

    def splits(self, ids: Sequence[Any], **how: Any) -> list[tuple[str, list[str]]]:
        """The device and the nodes of each split of `product`."""
        scheduler, run = self.product(ids, **how)()
        run()
        return [(scheduler.backends[s.backend].name, [n.name for n in s.nodes]) for s in scheduler.splits]

    @staticmethod
    def copies(trace: Trace) -> list[Copied]:
        """Every copy of a weight to the card, in order."""
        out, told, run = list[Copied](), dict[str, Any](), run_data(trace)
        names = {t["name"] for t in (trace.graph or {}).get("tensors", ()) if t["op"] == "NONE" and "input" not in t["flags"]}
        for e in trace.events:
            d = trace.described(e)
            if e.kind == "experts":
                told = d
            elif e.kind in ("set", "set_async"):
                name = run.copies.get(str(d["name"]), (str(d["name"]),))[0]
                if name in names:
                    part = told.get("copy") == d["name"]
                    first, last, padding = (int(told[x]) for x in ("first", "last", "padding")) if part else (0, -1, 0)
                    out.append(Copied(name, first, last, int(d["bytes"]), padding))
                told = {}
        return out

    @staticmethod
    def reads_of_ids(trace: Trace) -> int:
        """How often the host reads ids."""
        return sum(c.startswith("ask") and " to send " in c or c.startswith("copy ids from") for c in calls(trace))

    # ---- real texts

    def tokens(self, n: int) -> np.ndarray:
        """The first `n` tokens of the Python sample."""
        return self.routes("tiny-mixtral", "python").tokens[:n]

    def experts_of(self, n_tokens: int, everything: bool = False) -> Ran:
        """A prompt of `n_tokens` tokens through the Mixtral, experts on the host; everything: each weight is moved whole."""
        make = self.decode(n_tokens)

        def whole() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
            scheduler, run = make()
            scheduler.transfer = WholeTensor()
            return scheduler, run

        return outcome(whole if everything else make)

    @cached_property
    def tiny(self) -> dict[str, models.Model]:
        """The two shipped models: 8 experts of which a token uses 2, and 16 of which it uses 4."""
        return {name: models.load(f"{name}-f16") for name in ("tiny-mixtral", "tiny-deepseek")}

    def routes(self, name: str, text: str) -> RouteTrace:
        """The experts of the first 512 tokens of one of the texts."""
        return self._routes(name, text)

    @cached_property
    def _routes(self) -> Callable[[str, str], RouteTrace]:
        @cache
        def routes(name: str, text: str) -> RouteTrace:
            if text not in TEXTS:
                raise ParameterError(f"text {text!r}", f"one of {', '.join(TEXTS)}")
            model = self.tiny[name]
            ids = model.tokenizer.encode((paths.models_dir() / "samples" / f"{text}.txt").read_text("utf-8")[:3000])[:512]
            with models.Session(model, n_ctx=512, recording=True) as session:
                session.decode(ids)
                return session.routes

        return routes

    def used(self, name: str, text: str, n: int, layer: int = 0, window: int = 0) -> list[int]:
        """The experts that `n` tokens of a text use in a layer: window 0 is the first n tokens, 1 the next."""
        return [int(e) for e in np.unique(self.routes(name, text).experts[layer, window * n : (window + 1) * n])]

    def distinct(self, name: str, n: int) -> float:
        """Different experts that `n` neighbouring tokens use in a layer: the mean over layers, texts and all windows."""
        found = []
        for r in (self.routes(name, text) for text in TEXTS):
            is_used = np.zeros((r.n_layers, r.n_tokens, r.n_expert), bool)
            np.put_along_axis(is_used, r.experts.astype(np.int64), True, axis=2)
            whole = r.n_tokens // n * n
            found.append(is_used[:, :whole].reshape(r.n_layers, -1, n, r.n_expert).any(2).sum(-1).ravel())
        return float(np.concatenate(found).mean())

    @staticmethod
    def expected(n_expert: int, k: int, n: int) -> float:
        """Different experts that `n` tokens use, if each draws `k` at random."""
        return n_expert * (1 - (1 - k / n_expert) ** n)

    @staticmethod
    def carried(used: Sequence[int], n_expert: int, expert_bytes: int, speed: cost.Speed = cost.GPU) -> tuple[int, int, int]:
        """Copies, bytes and nanoseconds that bringing these experts takes, by the runtime's own rule."""
        parts = list(expert_copies(list(used), n_expert, expert_bytes))
        return len(parts), sum(p.size for p in parts), sum(speed.transfer_ns(p.size) for p in parts)

    @staticmethod
    def tried(used: Sequence[int], size: int, copy_ns: float, byte_ns: float) -> float:
        """The least time of all ways to divide the used experts into copies, found by trying each."""
        best, gaps = float("inf"), len(used) - 1
        for cuts in range(1 << gaps):  # bit g: a new copy begins behind gap g
            total, first = 0.0, used[0]
            for g in range(gaps + 1):
                if g == gaps or cuts >> g & 1:
                    total += copy_ns + (used[g] - first + 1) * size * byte_ns
                    first = used[g + 1] if g < gaps else first
            best = min(best, total)
        return best

    def gpt_oss(self) -> tuple[int, int, int]:
        """Shapes of gpt-oss-120b: experts, bytes of an expert's matrix (2,880 × 2,880, in mxfp4 17 bytes for 32 numbers), of its bias."""
        return 128, 2880 * 2880 // 32 * 17, 2880 * 4

    @staticmethod
    def card(name: str = "rtx3090-pcie4") -> cost.Speed:
        """The cost model of a card."""
        return cost.preset(name).speed
