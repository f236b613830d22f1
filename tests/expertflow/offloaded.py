"""A model that runs with part of its experts on a simulated card, and the same model all there."""

import numpy as np

from workbench.devices.simulated import simulated_machine
from workbench.expertflow.engine import ExpertEngine, expert_weights
from workbench.expertflow.pool import ExpertPool
from workbench.models import Session, place_weights
from workbench.scheduler import Scheduler
from workbench.trace import Trace


class LastUsed:
    """A policy in a few lines, so that tests of the engine do not stand or fall with those of `policies`."""

    def __init__(self, n):
        self.n, self.order = n, {}

    def step(self, layer, experts):
        wanted = [(layer, e) for e in experts]
        for key in wanted:
            if key in self.order:
                self.order[key] = self.order.pop(key)
                yield "hit", *key
        for key in wanted:
            if key not in self.order:
                if len(self.order) >= self.n:
                    victim = next(k for k in self.order if k not in wanted)
                    del self.order[victim]
                    yield "evict", *victim
                self.order[key] = True
                yield "load", *key

    def forget(self, experts):
        for key in experts:
            del self.order[key]


def expert_bytes(model):
    return sum(w.nbytes for merged in expert_weights(model).values() for w in merged)


class Run:
    """A session over a card of its own; budget None: everything is on the card."""

    def __init__(self, model, budget, policy=None, host_below=0, n_seq_max=1, trace=True, n_batch=512, **pool):
        self.backends = simulated_machine(offload_min_batch=1)
        self.card, self.engine = self.backends[0], None
        if budget is None:
            self.placed = place_weights(model, self.backends)
        else:
            self.placed = place_weights(model, self.backends, overrides={"_exps": "CPU"})
            self.pool = ExpertPool(self.card, expert_weights(model), budget, scrub=True, verify=True, **pool)
            self.engine = ExpertEngine(self.pool, policy or LastUsed(self.pool.n_slots(min(self.pool.weights))), host_below)
        self.scheduler = Scheduler(self.backends, transfer=self.engine)
        self.session = Session(self.placed, scheduler=self.scheduler, n_ctx=512, n_seq_max=n_seq_max, n_batch=n_batch)
        self.scheduler.trace = self.trace = Trace("virtual") if trace else None

    def text(self, tokens, n=6):
        """Logits of a prompt, and of the `n` greedy tokens after it."""
        out = [self.session.decode(tokens, outputs="all")]
        for _ in range(n):
            out.append(self.session.decode([int(np.argmax(out[-1].reshape(-1, out[-1].shape[-1])[-1]))])[None])
        return np.concatenate(out)

    def count(self, kind):
        return sum(e.kind == kind for e in self.trace.events)

    def close(self):
        self.session.close()
        self.placed.close()
