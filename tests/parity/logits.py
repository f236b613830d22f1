"""`logits MODEL.gguf ORACLE.npz…`: logits, experts and greedy tokens against real llama.cpp. A case is a prompt.

Against `*.dequant-f32.npz` (llama.cpp on the same weights in f32) without rounding: logits within 1e-4 at every position, the
same experts in the same order, the same greedy tokens with the same lead up to the first position whose recorded lead is
below 2e-4. Against the plain `*.npz` with activation_rounding="ggml", where a last-bit difference at a rounding edge grows
and may flip a near tie of the router: over the file (the last case) at most 3 differing (layer, token) expert sets in 1,530
and a mean difference of at most 0.010 over the positions before the first flip of each prompt; in each prompt no logit
further apart than 0.5 before its first flip. Greedy tokens are not compared there: after a flip texts go apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.report import BadInput, Report, judge_files
from workbench.models import Model, Session
from workbench.moe.routes import DAMAGED_NPZ

MAX_DIFFERENCE, SMALL_LEAD = 1e-4, 2e-4
MEAN_BEFORE_FLIP, MOST_BEFORE_FLIP, FLIPS_PER_SETS = 0.010, 0.5, 3 / 1530
FIELDS = {"tokens": 1, "logits": 2, "experts": 3, "greedy": 1, "greedy_margin": 1}


def main(args: list[str]) -> int:
    """Compare and print; 0: all passed, 1: some failed, 2: bad input."""
    return judge_files("logits", args, "MODEL.gguf ORACLE.npz…", run_file)


def run_file(report: Report, model: Model, path: Path) -> None:
    """All prompts of one oracle file."""
    prompts = read_oracle(path, model)
    exact = path.name.endswith(".dequant-f32.npz")
    n_ctx = max(len(p["tokens"]) + len(p["greedy"]) for p in prompts.values())
    seen = Rounded(path.name)
    with Session(model, n_ctx, recording=True, activation_rounding="none" if exact else "ggml") as session:
        for name, prompt in prompts.items():
            session.reset()
            session.clear_routes()
            logits = session.decode(prompt["tokens"], outputs="all")
            experts = session.routes.experts
            if exact:
                found = [*exact_differences(prompt, logits, experts), *greedy_differences(prompt, session, logits[-1])]
            else:
                found = seen.prompt(prompt, logits, experts)
            report.case(f"{path.name} {name}", found)
    if not exact:
        report.case(f"{path.name} all prompts", seen.all_prompts(), str(seen))


def exact_differences(prompt: dict[str, np.ndarray], logits: np.ndarray, experts: np.ndarray) -> Iterator[str]:
    """Logits and experts, computed in f32 on both sides."""
    difference = np.abs(logits - prompt["logits"]).max(-1)
    if not difference.max() <= MAX_DIFFERENCE:
        t = int(np.argmax(~(difference <= MAX_DIFFERENCE)))
        yield f"logits (of tokens) at position {t}: {difference[t]:.3g} apart, at most {MAX_DIFFERENCE:g} allowed"
    differing = (experts != prompt["experts"]).any(-1)
    if differing.any():
        layer, t = map(int, np.argwhere(differing)[0])
        yield (f"experts: {int(differing.sum())} of {differing.size} lists differ, first in expert layer {layer} at position {t}: "
               f"{experts[layer, t].tolist()} instead of {prompt['experts'][layer, t].tolist()}")  # fmt: skip


def greedy_differences(prompt: dict[str, np.ndarray], session: Session, last: np.ndarray) -> Iterator[str]:
    """The greedy continuation, one token at a time through the KV cache."""
    session.recording = False
    try:
        for i, (token, lead) in enumerate(zip(prompt["greedy"].tolist(), prompt["greedy_margin"].tolist(), strict=True)):
            if lead < SMALL_LEAD:
                return
            second, first = np.sort(last)[-2:]
            if int(last.argmax()) != token:
                yield f"greedy: token {i} is {int(last.argmax())} instead of {token}"
                return
            if not abs(first - second - lead) <= 2 * MAX_DIFFERENCE:
                yield f"greedy_margin: {first - second:.6g} instead of {lead:.6g} at token {i}"
            if i + 1 < len(prompt["greedy"]):
                last = session.decode([token])
    finally:
        session.recording = True


class Rounded:
    """The account of a file that was recorded with rounded activations."""

    def __init__(self, name: str) -> None:
        self.name, self.flips, self.sets = name, 0, 0
        self.total, self.count = 0.0, 0

    def prompt(self, prompt: dict[str, np.ndarray], logits: np.ndarray, experts: np.ndarray) -> list[str]:
        """Count a prompt, and judge the logits before its first flip."""
        flipped = (np.sort(experts, -1) != np.sort(prompt["experts"], -1)).any(-1)
        self.flips, self.sets = self.flips + int(flipped.sum()), self.sets + flipped.size
        before = int(np.argmax(np.append(flipped.any(0), True)))
        difference = np.abs(logits - prompt["logits"])[:before]
        self.total, self.count = self.total + float(difference.sum(dtype=np.float64)), self.count + difference.size
        if not before or difference.max() <= MOST_BEFORE_FLIP:
            return []
        t = int(np.argmax(~(difference.max(-1) <= MOST_BEFORE_FLIP)))
        return [f"logits (of tokens) at position {t}: {difference[t].max():.3g} apart before any flip, at most {MOST_BEFORE_FLIP} allowed"]

    def all_prompts(self) -> list[str]:
        """Judge the whole file."""
        limit = max(3, math.floor(FLIPS_PER_SETS * self.sets))
        found = [f"experts: {self.flips} of {self.sets} sets differ, at most {limit} may"] if self.flips > limit else []
        if not self.mean <= MEAN_BEFORE_FLIP:
            found.append(f"logits (of tokens): {self.mean:.4f} apart on average before the first flips, at most {MEAN_BEFORE_FLIP} allowed")
        return found

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    def __str__(self) -> str:
        return f"{self.flips} of {self.sets} expert sets differ, mean difference before the first flips {self.mean:.5f}"


def read_oracle(path: Path, model: Model) -> dict[str, dict[str, np.ndarray]]:
    """prompt -> field -> array, checked against the model."""
    hp = model.hparams
    try:
        with np.load(path, allow_pickle=False) as file:
            data: dict[str, Any] = dict(file)
    except DAMAGED_NPZ as e:
        raise BadInput(f"{path.name} is not a readable .npz file: {e}") from None
    names = sorted({key.split("_", 1)[0] for key in data})
    prompts = {name: {f: data.get(f"{name}_{f}", np.empty(())) for f in FIELDS} for name in names}
    if not prompts:
        raise BadInput(f"{path.name} holds no prompts")
    for name, prompt in prompts.items():
        for field, ndim in FIELDS.items():
            if prompt[field].ndim != ndim:
                raise BadInput(f"{path.name}: {name}_{field} is missing or has {prompt[field].ndim} dimensions instead of {ndim}")
        n = len(prompt["tokens"])
        for field, shape in {"logits": (n, hp.n_vocab), "experts": (len(hp.moe_layers), n, hp.n_expert_used),
                             "greedy_margin": prompt["greedy"].shape}.items():  # fmt: skip
            if prompt[field].shape != shape:
                raise BadInput(f"{path.name}: {name}_{field} has shape {prompt[field].shape} instead of {shape}: made from another model?")
    return prompts
