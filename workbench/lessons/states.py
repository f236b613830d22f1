"""The state that lesson sections start from, so that each runs after the set-up cell alone. Public names only."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from workbench import models, paths
from workbench.devices import CpuBackend, Plan
from workbench.devices.simulated import simulated_machine
from workbench.errors import ContextClosed
from workbench.execution import GraphRunner
from workbench.lessons.balance_states import Lesson17 as Lesson17
from workbench.lessons.balance_states import Lesson18 as Lesson18
from workbench.lessons.cache_states import Lesson22 as Lesson22
from workbench.lessons.device_states import Lesson07 as Lesson07
from workbench.lessons.devices_states import Lesson26 as Lesson26
from workbench.lessons.expert_states import Lesson19 as Lesson19
from workbench.lessons.graph_states import Lesson03 as Lesson03
from workbench.lessons.graph_states import Lesson04 as Lesson04
from workbench.lessons.memory_pressure_states import Lesson24 as Lesson24
from workbench.lessons.moe_states import Lesson15 as Lesson15
from workbench.lessons.moe_states import Lesson16 as Lesson16
from workbench.lessons.own_model_states import Lesson27 as Lesson27
from workbench.lessons.pipeline_states import Lesson14 as Lesson14
from workbench.lessons.placement_states import Lesson10 as Lesson10
from workbench.lessons.placement_states import Lesson11 as Lesson11
from workbench.lessons.prediction_states import Lesson21 as Lesson21
from workbench.lessons.queue_states import Lesson23 as Lesson23
from workbench.lessons.run_states import Lesson13 as Lesson13
from workbench.lessons.schedule_states import Lesson08 as Lesson08
from workbench.lessons.schedule_states import Lesson09 as Lesson09
from workbench.lessons.split_states import Lesson12 as Lesson12
from workbench.lessons.thread_states import Lesson05 as Lesson05
from workbench.lessons.training_states import Lesson06 as Lesson06
from workbench.lessons.tuning_states import Lesson25 as Lesson25
from workbench.lessons.wall_states import Lesson20 as Lesson20
from workbench.models.session import fill_inputs
from workbench.moe import RouteTrace
from workbench.scheduler import Scheduler
from workbench.scheduler.whatif import Case
from workbench.tensors import Context, Flag, Tensor, ops

DOMAINS = ("python", "english", "c", "chinese", "maths", "numeric")


def token_source(model: models.Model, sampler: models.Sampler | None = None) -> Any:
    """A source for `widgets.PromptPlayer`: each token of the prompt, then each new one, with its routes in every layer."""

    def tokens(prompt: str, n_tokens: int) -> Generator[dict[str, Any], None, str]:
        draw = sampler or models.Sampler()
        draw = models.Sampler(draw.temperature, draw.top_k, draw.top_p, draw.seed)  # every run starts from the same seed
        with models.Session(model, recording=True) as session:
            room, ids = session.n_ctx, model.tokenizer.encode(prompt)[: session.n_ctx]
            logits, words = session.decode(ids), model.tokenizer.stream(special=True)
            yield from _with_routes(ids, words, session.routes, given=True)
            new = min(n_tokens, room - len(ids))
            for _ in range(new):
                token = draw(logits)
                if token in model.tokenizer.eog:
                    return "the model ended its text"
                session.clear_routes()
                logits = session.decode([token])
                yield from _with_routes([token], words, session.routes, given=False)
            return f"the context of {room} tokens is full" if new < n_tokens else ""

    return tokens


def _with_routes(ids: list[int], words: Any, routes: RouteTrace, given: bool) -> Iterator[dict[str, Any]]:
    for i, token in enumerate(ids):
        yield {"id": token, "text": words.push(token) or "…", "given": given, "experts": routes.experts[:, i].tolist(),
               "weights": np.round(routes.weights[:, i].astype(float), 4).tolist()}  # fmt: skip


class Lesson00:
    """Start here: the tiny Mixtral, one recorded text, the graph of one step, samples of six domains."""

    prompt = "And God said unto Moses, Go in unto"

    @cached_property
    def model(self) -> models.Model:
        """The really trained model, mapped from its file."""
        return models.load("tiny-mixtral-f16")

    @cached_property
    def llama_cpp(self) -> dict[str, Any]:
        """What llama.cpp computed for one prompt with the same weights: tokens, the last row of logits, its number of nodes."""
        return json.loads((paths.models_dir() / "metrics" / "lesson00_llama_cpp.json").read_text("utf-8"))

    def token_source(self, sampler: models.Sampler | None = None) -> Any:
        """A source for `widgets.PromptPlayer`; every run starts from the sampler's seed."""
        return token_source(self.model, sampler)

    @cached_property
    def run(self) -> list[dict[str, Any]]:
        """The tokens of `prompt` and of its continuation by 48, always the same, with their routes."""
        return list(self.token_source(models.Sampler(temperature=0.7, seed=1))(self.prompt, 48))

    @cached_property
    def step(self) -> models.StepGraph:
        """The graph of one decode step: one token, 256 visible cells of the cache, one row of logits."""
        cache = models.KVCache(self.model.hparams, 256, self._runner.backend.buffer_type)
        return models.build_step(self.model, cache, n_tokens=1, n_kv=256, n_outputs=1)

    @cached_property
    def two_devices(self) -> Case:
        """`step` over a simulated card and a host, which keeps all experts (llama.cpp's --cpu-moe)."""
        devices = simulated_machine()
        placed = models.place_weights(self.model, devices, overrides={"_exps": "CPU"})
        step = models.build_step(placed, models.KVCache(placed.hparams, 256, placed.layer_types), 1, 256, 1)
        return Case.of(Scheduler(devices), step.graph, "one token, experts on the host")

    @cached_property
    def plan(self) -> Plan:
        """`step` in memory of its own, planned for a CPU with 8 threads."""
        return self._runner.prepare(self.step.graph)

    @cached_property
    def _runner(self) -> GraphRunner:
        return GraphRunner(CpuBackend(n_threads=8))

    @cached_property
    def domains(self) -> dict[str, RouteTrace]:
        """The routes of the first 192 tokens of a sample of each domain."""
        out = {}
        for name in DOMAINS:
            text = (paths.models_dir() / "samples" / f"{name}.txt").read_text("utf-8")[:2000]
            out[name] = self.routes(self.model.tokenizer.encode(text)[:192])
        return out

    def scores(self, tokens: list[int], layer: int) -> np.ndarray:
        """What the router of `layer` gives to each of its experts, (tokens, experts), kept from a run of the whole graph."""
        n, model = len(tokens), self.model
        cache = models.KVCache(model.hparams, n, self._runner.backend.buffer_type)
        step = models.build_step(model, cache, n, cache.n_ctx, n)
        step.routings[layer].probs.mark(Flag.OUTPUT)  # else a later node takes over its memory
        self._runner.prepare(step.graph)
        at, seq = np.arange(n), np.zeros(n, np.int64)
        fill_inputs(step, cache, np.array(tokens), at, seq, cache.take(seq, at), at)
        self._runner.run(step.graph)
        return step.routings[layer].probs.numpy().copy()

    def routes(self, tokens: list[int]) -> RouteTrace:
        """The routes of a text of its own, read in one go. The session is kept, so that a knob redraws at once."""
        with self._turn:
            self._session.reset()
            self._session.clear_routes()
            self._session.decode(tokens)
            return self._session.routes

    @cached_property
    def _session(self) -> models.Session:
        return models.Session(self.model, recording=True)

    _turn = threading.Lock()  # callbacks of widgets may come on another thread


class Lesson01:
    """Tensors: the tiny Mixtral as it is stored in three types."""

    @cached_property
    def files(self) -> dict[str, models.Model]:
        """The same weights in three files, by storage type."""
        return {kind: models.load(f"tiny-mixtral-{kind}") for kind in ("f16", "q8_0", "q4_0")}


class Lesson02(Lesson00):
    """Context and arena: a recorded run of real ggml, small programs with and without a use after free, lesson 00's model."""

    GGML_RUN = (("f32 [1]", 384), ("f32 [3]", 768), ("f16 [7, 5]", 1216), ("q8_0 [64, 3]", 1792), ("q4_K [256, 2]", 2448),
                ("f16 [7, 2]", 2848), ("f32 [8, 4]", 3344), ("f32 [8, 2]", 3776), ("mul_mat", 4176), ("transpose", 4544),
                ("relu", 4944))  # fmt: skip
    """What `ggml_used_mem` said after each step, in ggml 0.25.3 called from Python (also a test of the package)."""

    programs: tuple[tuple[tuple[str, ...], ...], ...] = (
        (("make", "w", "A"), ("make", "x", "B"), ("use", "w"), ("close", "B"), ("use", "w")),
        (("make", "w", "A"), ("make", "x", "B"), ("close", "A"), ("use", "x"), ("use", "w")),
        (("make", "t", "A"), ("view", "v", "t"), ("use", "v"), ("reset", "A"), ("use", "v")),
        (("make", "t", "A"), ("reset", "A"), ("make", "t", "A"), ("use", "t"), ("close", "A"), ("view", "v", "t")),
        (("make", "t", "A"), ("make", "u", "B"), ("view", "v", "u"), ("reset", "A"), ("use", "v"), ("close", "B"), ("use", "u")),
    )
    """Steps ("make", tensor, context), ("view", tensor, of), ("use", tensor), ("reset" or "close", context)."""

    def replay(self, context: Context) -> Iterator[tuple[str, int, int]]:
        """Do the steps of GGML_RUN in `context`; yields (step, bytes of its data, what real ggml said was in use then)."""
        for step, recorded in self.GGML_RUN:
            if step in ("mul_mat", "transpose", "relu"):
                a, b = context.tensors[6], context.tensors[7]
                t = ops.mul_mat(a, b) if step == "mul_mat" else ops.transpose(a) if step == "transpose" else ops.relu(context.tensors[8])
            else:
                kind, _, ne = step.partition(" ")
                t = context.new_tensor(kind, *json.loads(ne))
            yield step, 0 if t.is_view else t.nbytes, recorded

    @staticmethod
    def run_program(program: tuple[tuple[str, ...], ...]) -> int:
        """Do the steps with real contexts; the index of the first that raises ContextClosed, or -1."""
        contexts: dict[str, Context] = {}
        tensors: dict[str, Tensor] = {}
        for i, (what, name, *more) in enumerate(program):
            try:
                if what == "make":
                    context = contexts.setdefault(more[0], Context(4096, name=more[0]))
                    tensors[name] = context.new_tensor("f32", 4, name=name)
                elif what == "view":
                    tensors[name] = tensors[more[0]].reshape(2, 2)
                elif what == "use":
                    tensors[name].numpy()
                else:
                    getattr(contexts[name], what)()
            except ContextClosed:
                return i
        return -1
