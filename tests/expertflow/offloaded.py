"""A model that runs with part of its experts on a simulated card, and the same model all there."""

import numpy as np

from workbench.devices.simulated import simulated_machine
from workbench.expertflow.offload import offload
from workbench.models import Session, place_weights
from workbench.scheduler import Scheduler
from workbench.trace import Trace


class Run:
    """A session over a card of its own; budget None: everything is on the card; "copied": experts on the host, those used are copied by
    ggml's rule. speed: of the card."""

    def __init__(self, model, budget, n_seq_max=1, speed=None, **options):
        self.backends = simulated_machine(offload_min_batch=1, speed=speed)
        self.card, self.trace = self.backends[0], Trace("virtual")
        if budget in (None, "copied"):
            self.placed = place_weights(model, self.backends, overrides={"_exps": "CPU"} if budget else None)
            self.session = Session(self.placed, scheduler=Scheduler(self.backends), n_ctx=512, n_seq_max=n_seq_max)
            return
        self.offloaded = offload(model, budget, backends=self.backends, n_ctx=512, n_seq_max=n_seq_max, verify=True, scrub=True,
                                 trace=self.trace, **options)
        self.session, self.engine, self.placed = self.offloaded.session, self.offloaded.engine, self.offloaded.session.model
        self.pool, self.counters = self.engine.pool, self.engine.counters

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
