"""The scheduler: passes that decide, splits that cut, a runtime that copies, waits and computes (`ggml_backend_sched`)."""

from workbench.scheduler.passes import CAUSES, STAGES, Assignment, cause_in_words
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.splits import Split, Splitter
from workbench.scheduler.transfer import UsedExperts, WeightTransfer, WholeTensor

__all__ = ["CAUSES", "STAGES", "Assignment", "Scheduler", "Split", "Splitter", "UsedExperts", "WeightTransfer", "WholeTensor",
           "cause_in_words"]  # fmt: skip
