"""The table of ops: one row per op, its columns filled by the rooms that know them.

`tensors.ops` states the shape rule (the constructor), the cost and the in-place rule; `kernels` fills `kernel` and
`reference`; `cgraph.gradients` fills `backward`. A column that stays empty needs a reason in `without`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workbench.tensors.tensor import Tensor

Cost = Callable[[Tensor], int]


def bytes_touched(node: Tensor) -> int:
    """Bytes that computing `node` reads and writes when each source is read once; what lies between the rows of a view is not read."""
    return packed_bytes(node) + sum(packed_bytes(s) for s in node.sources() if s is not node)


def packed_bytes(t: Tensor) -> int:
    """Bytes of a tensor without gaps, and without rows that it shows several times."""
    return min(t.nbytes, t.dtype.row_bytes(t.ne[0]) * t.n_rows)


def per_element(n: int) -> Cost:
    """`n` floating-point operations per element of the result."""
    return lambda node: n * node.n_elements


@dataclass
class OpSpec:
    """One row of the table.

    name: the telling name (`ggml_op_desc`: SILU); op: ggml's op (`ggml_op_name`: UNARY); summary: the formula in a line.
    in_place: the result may take over the memory of a source of the same layout (`ggml_op_can_inplace`).
    is_view: no arithmetic, only another description of the same bytes.
    flops / moved: floating-point operations and bytes of one node.
    kernel: `kernels.Kernel`; reference: `fn(node, sources) -> array`, the slow definition; backward: `cgraph.gradients.Gradient`.
    without: for each empty column the reason why it stays empty.
    """

    name: str
    op: str
    summary: str
    in_place: bool = False
    is_view: bool = False
    flops: Cost = per_element(1)
    moved: Cost = bytes_touched
    kernel: Any = None
    reference: Callable[..., Any] | None = None
    backward: Any = None
    without: dict[str, str] = field(default_factory=dict)


OPS: dict[str, OpSpec] = {}
"""Every op by its telling name."""


def op(name: str, summary: str, *, of: str = "", **columns: Any) -> OpSpec:
    """Add a row to the table and return it. `of` is ggml's op where it is shared: `op("SILU", …, of="UNARY")`."""
    assert name not in OPS, f"two rows for {name}"
    OPS[name] = OpSpec(name, of or name, summary, **columns)
    return OPS[name]
