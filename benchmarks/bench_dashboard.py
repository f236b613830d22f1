"""From a moved knob of lesson 25's dashboard to its new HTML: processor time, which other work on the machine changes little."""

from time import process_time

import numpy as np

from benchmarks.harness import Table, duration
from workbench.lessons.states import Lesson25

LIMIT = 0.1
"""Seconds in which a move has to be answered."""


def tables():
    dashboard, rng = Lesson25().dashboard(), np.random.default_rng(0)
    took = {label: [] for label, *_ in dashboard.knobs}
    for _ in range(300):
        i, values = int(rng.integers(len(dashboard.knobs))), list(dashboard.values)
        label, low, high, _ = dashboard.knobs[i]
        values[i] = int(rng.choice([v for v in range(low, high + 1) if v != values[i]]))
        start = process_time()
        dashboard.values = values
        took[label].append(process_time() - start)
    table = Table(f"300 moves of random knobs, limit {duration(LIMIT)}", ["knob", "moves", "median", "95 of 100", ""])
    for label, times in [*took.items(), ("all", sum(took.values(), []))]:
        p95 = float(np.percentile(times, 95))
        table.add(label, len(times), duration(float(np.median(times))), duration(p95), "ok" if p95 <= LIMIT else "above")
    yield table
