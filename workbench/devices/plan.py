"""`Plan`: a graph bound to its memory and its kernels, ready to be run many times (`ggml_cplan`).

Everything that does not change between runs is settled here once: which nodes need work, how their work is cut, how much
scratch memory they need, and one call without arguments per node. Running the plan is walking a list of such calls.

The cut depends on the shape alone, never on the number of threads, so every number of threads makes the same calls and
gets the same bits.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from workbench.devices.threads import SINGLE_THREADED_BLAS
from workbench.errors import GraphError
from workbench.kernels.kernel import NUMPY_BUFFER, IndexOutOfRange, Kernel, Scratch, Step, grain
from workbench.tensors.storage import Storage
from workbench.tensors.tensor import Flag, Moves, Tensor

if TYPE_CHECKING:
    from workbench.devices.backend import Backend, NodeList

ROWS = 64
"""Work is cut at multiples of this many rows (or columns, or elements)."""
MAX_TASKS = 16
TASK_NS = 50_000
"""A task should take at least this long, else waking a thread for it costs more than it saves."""
FLOPS_PER_NS, BYTES_PER_NS = 50, 10
"""A rough machine for that estimate. It is a constant on purpose: the cut must be the same everywhere."""

_BLAS_OPS = frozenset({"MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "MUL_MAT_ID_BACK", "OUT_PROD_ID"})
_COMPUTE = int(Flag.COMPUTE)
_WHERE = operator.attrgetter("_storage", "_offset", "context")


class Recorder(Protocol):
    """Anything that takes the times of nodes: index in the graph, start and end in nanoseconds.

    One that has a method `task`, as `Trace` has, is also told of every task: see `Trace.task`.
    """

    def node(self, i: int, start_ns: int, end_ns: int) -> None:
        """One node was computed."""
        ...


class PlannedNode(NamedTuple):
    """A line of `Plan.table()`: name, op, tasks, bytes of scratch, floating-point operations, bytes read and written."""

    node: str
    op: str
    tasks: int
    work: int
    flops: int
    moved: int


class _Job(NamedTuple):
    """A node that needs work, and how that is cut: slices of the result along `axis`; one slice is the whole."""

    at: int  # index in the graph
    node: Tensor
    kernel: Kernel
    operands: tuple[Any, ...]
    out: Any
    axis: int
    parts: list[slice]
    scratch: int  # bytes for one task


class Plan:
    """A graph bound to memory and kernels (`ggml_cplan`), made by `Backend.plan`.

    work_size: bytes of the work buffer, shared by the nodes: the largest need of any one of them.
    """

    def __init__(self, backend: Backend, graph: NodeList) -> None:
        graph.require_open()
        self.backend = backend
        self._n_nodes = len(graph.nodes)
        nodes = [(i, t) for i, t in enumerate(graph.nodes) if needs_work(t)]
        touched = dict.fromkeys(s for _, t in nodes for s in (*t.sources(), t))
        for t in touched:
            t.require_data()
        for _, t in nodes:
            backend.require_op(t)
        self._touched = list(touched)
        self._roots = list(dict.fromkeys(t.root() for t in touched))
        self._moves, self._where = Moves.count, list(map(_WHERE, self._roots))
        self._contexts = {c for c in (getattr(graph, "context", None), *(t.context for t in touched)) if c is not None}
        self._storages: list[Storage] = list({id(s): s for s, _, _ in self._where}.values())
        self.jobs = [_job(backend, i, t) for i, t in nodes]
        self.work_size = max((job.scratch * self._at_once(job) for job in self.jobs), default=0)
        memory = backend.work_memory(self.work_size)
        self._steps = [self._step(job, memory) for job in self.jobs]
        blas = any(job.node.op in _BLAS_OPS for job in self.jobs)
        self._blas = SINGLE_THREADED_BLAS if blas and backend.xp is np else contextlib.nullcontext()

    # ---- what it holds

    def n_tasks(self, i: int) -> int:
        """Tasks of node `i` of the graph (`ggml_get_n_tasks`); 0 where there is nothing to do."""
        return next((len(job.parts) for job in self.jobs if job.at == i), 0)

    def table(self) -> list[PlannedNode]:
        """One line per node that needs work, in order."""
        return [
            PlannedNode(t.name, t.desc, len(job.parts), job.scratch * self._at_once(job), t.spec.flops(t), t.spec.moved(t))
            for job in self.jobs
            if (t := job.node).spec
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        cut = sum(len(job.parts) > 1 for job in self.jobs)
        return f"<Plan of {len(self):,} nodes on {self.backend.name}, {cut:,} of them cut, work buffer {self.work_size:,} bytes>"

    # ---- running

    def run(self, record: Recorder | None = None) -> None:
        """Compute every node in order. `record` is told the start and end of each; without it nothing is measured.

        Raises ContextClosed, NoDataError or StorageError where memory is gone, GraphError where it is elsewhere now.
        An exception of a kernel leaves with a note that names the node.
        """
        if not self.fits():
            for t in self._touched:
                t.require_data()
            for c in self._contexts:
                c.require_open()
            raise GraphError("tensors of this plan were placed in other memory since it was made", "the memory it is bound to",
                             "make another plan, or use GraphRunner, which does so by itself")  # fmt: skip
        self.execute(record)

    def fits(self, graph: NodeList | None = None) -> bool:
        """Whether all tensors are where they were, in open memory, and `graph` (where given) has no new nodes."""
        if self._moves != Moves.count:
            if list(map(_WHERE, self._roots)) != self._where:
                return False
            self._moves = Moves.count
        if any(c.closed for c in self._contexts) or any(s.closed for s in self._storages):
            return False
        return graph is None or len(graph.nodes) == self._n_nodes

    def execute(self, record: Recorder | None = None) -> None:
        """`run` for a caller that has just asked `fits`."""
        steps = iter(self._steps)
        with self.backend.lock, np.errstate(all="ignore"), self._blas:  # as in C: inf and nan are results
            np.setbufsize(NUMPY_BUFFER)  # until errstate ends
            try:
                if record is None:
                    for step in steps:
                        step()
                else:
                    self._timed(steps, record)
            except BaseException as e:
                self._name_node(e, len(self._steps) - operator.length_hint(steps) - 1)
                raise

    def calls(self) -> list[tuple[Tensor, Step]]:
        """Each node with the call that computes it alone, for a device that makes them when its clock says so."""
        return [(job.node, partial(self._call, k)) for k, job in enumerate(self.jobs)]

    def _call(self, k: int) -> None:
        with self.backend.lock, np.errstate(all="ignore"), self._blas:
            try:
                self._steps[k]()
            except BaseException as e:
                self._name_node(e, k)
                raise

    def _name_node(self, e: BaseException, k: int) -> None:
        """Let an exception of step k say which node it was."""
        if k >= 0:
            node = self.jobs[k].node
            if isinstance(e, IndexOutOfRange):
                raise e.named(node) from None
            e.add_note(f"while {self.backend.name} computed node {self.jobs[k].at}: {node.label} = {node.desc}")

    def _timed(self, steps: Iterator[Step], record: Recorder) -> None:
        note = getattr(record, "task", None)
        for job, step in zip(self.jobs, steps, strict=True):
            if note is not None:
                step = _noted(job, step, note)
            start = perf_counter_ns()
            step()
            self.backend.synchronize()  # a device that works by itself has only been asked
            record.node(job.at, start, perf_counter_ns())

    # ---- making it

    def _at_once(self, job: _Job) -> int:
        """Tasks of a node that may run at the same time."""
        return min(len(job.parts), self.backend.n_threads)

    def _step(self, job: _Job, memory: Any) -> Step:
        """The call that computes the whole node."""
        workers = self._at_once(job)
        if job.kernel.work is None:
            tasks = [[self._task(job, part, None) for part in job.parts]] * workers
        else:  # a thread's tasks share its piece of the work buffer
            pieces = [Scratch(memory[w * job.scratch : (w + 1) * job.scratch]) for w in range(workers)]
            tasks = [[self._task(job, part, piece) for part in job.parts] for piece in pieces]
        if len(job.parts) == 1:
            return tasks[0][0]
        return partial(self.backend.run_tasks, tasks) if workers > 1 else partial(_in_turn, tasks[0])

    def _task(self, job: _Job, part: slice, scratch: Scratch | None) -> Step:
        kernel, operands, out = job.kernel, job.operands, job.out
        extra = self.backend.kernel_options(job.node)
        if kernel.work is not None:
            extra["scratch"] = scratch
        if kernel.cut == "columns":
            extra["part"] = part
        elif len(job.parts) > 1:
            operands, out = _share(job, part)
        return kernel.bind(self.backend.xp, operands, out, job.node.params, **extra)


def _noted(job: _Job, step: Any, note: Callable[..., Any]) -> Step:
    """`step`, whose tasks also tell `note`: node, task, thread, first row, end of the rows, start and end in nanoseconds."""
    def one(task: Step, i: int, thread: int) -> Step:
        def call() -> None:
            start = perf_counter_ns()
            task()
            note(job.at, i, thread, job.parts[i].start, job.parts[i].stop, start, perf_counter_ns())

        return call

    if len(job.parts) == 1:
        return one(step, 0, 0)
    alone = step.func is _in_turn
    told = [[one(task, i, thread) for i, task in enumerate(mine)] for thread, mine in enumerate(step.args if alone else step.args[0])]
    return partial(step.func, told[0] if alone else told)


def needs_work(node: Tensor) -> bool:
    """Whether computing `node` does anything: views and empty tensors do not, nor nodes that were only ordered."""
    return node.op != "NONE" and bool(int(node.flags) & _COMPUTE) and not (node.spec and node.spec.is_view) and 0 not in node.ne


def _job(backend: Backend, index: int, node: Tensor) -> _Job:
    assert node.spec is not None
    kernel = backend.kernel(node)
    operands = backend.operands(node)
    out = backend.operand(node)
    axis, parts = cut(node) if grain() == 1 else (3, [slice(0, node.ne[0])])
    scratch = kernel.work(node) if kernel.work else 0
    return _Job(index, node, kernel, operands, out, axis, parts, -(-scratch // 64) * 64)


def cut(node: Tensor, task_ns: int | None = None) -> tuple[int, list[slice]]:
    """Along which axis (of NumPy's order) the work of `node` is cut, and where: by its shape and types alone.

    By the kernel's own rule, else in about equal multiples of 64. `task_ns`: how long a task should take at least, for
    those who want to know what another limit would do; plans are made with the default.
    """
    assert node.spec is not None
    kernel: Kernel = node.spec.kernel
    if kernel.parts is not None:
        return 3, kernel.parts(node) if task_ns is None else kernel.parts(node, task_ns)
    n = node.ne[::-1]
    axis = max(range(4), key=n.__getitem__) if kernel.cut == "elements" else 2
    tasks = min(_worthwhile_tasks(node, task_ns or TASK_NS), n[axis] // ROWS)
    if kernel.cut is None or tasks < 2 or not all(_sliceable(s, axis, n[axis]) for s in (node, *node.src)):
        return axis, [slice(0, n[axis])]
    step = -(-n[axis] // (tasks * ROWS)) * ROWS
    return axis, [slice(a, min(a + step, n[axis])) for a in range(0, n[axis], step)]


def _worthwhile_tasks(node: Tensor, task_ns: int) -> int:
    assert node.spec is not None
    ns = node.spec.flops(node) // FLOPS_PER_NS + node.spec.moved(node) // BYTES_PER_NS
    return min(MAX_TASKS, ns // task_ns)


def _sliceable(t: Tensor | None, axis: int, extent: int) -> bool:
    """Whether a tensor has the whole extent along the axis, or one element that serves all parts; blocks cannot be cut."""
    return t is None or (t.dtype.numpy is not None and t.ne[3 - axis] in (1, extent))


def _share(job: _Job, part: slice) -> tuple[tuple[Any, ...], Any]:
    """What one task works on: this part of each operand, and of the result.

    Elements of arrays that are packed alike are a run of memory of that size, wherever the axis lies: strips of 64 columns
    would cost an inner loop each.
    """
    arrays, shape = [*job.operands, job.out], job.out.shape
    if job.kernel.cut == "elements" and all(a is not None and a.shape == shape and a.flags.c_contiguous for a in arrays):
        each = job.out.size // shape[job.axis]
        arrays = [a.reshape(-1)[part.start * each : part.stop * each] for a in arrays]
    else:
        arrays = [_piece(a, job.axis, part) for a in arrays]
    return tuple(arrays[:-1]), arrays[-1]


def _piece(array: Any, axis: int, part: slice) -> Any:
    if array is None or array.shape[axis] == 1:
        return array
    return array[(slice(None),) * axis + (part,)]


def _in_turn(steps: Sequence[Callable[[], Any]]) -> None:
    for step in steps:
        step()
