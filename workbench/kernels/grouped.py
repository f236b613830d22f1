"""MUL_MAT_ID for devices on which asking for work costs more than a small product: few calls instead of one per expert.

It is the same function as `products.mul_mat_id` with other cuts, so results agree but for rounding. A few tokens gather the
matrices of their experts and make one batched product, with no look at the ids (`by_place`). Many tokens are sorted by expert
on the host, which reads the ids once: groups of about equal size are padded and make one batched product (`padded`),
else each expert makes one (`in_turn`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from workbench.kernels.blocks import decode, round_input, rounds_input
from workbench.kernels.kernel import IndexOutOfRange, Kernel, require_within
from workbench.kernels.products import WHOLE, blas_layout, by_expert, decode_room, id_type
from workbench.kernels.weights import WeightSource, cells

FEW_PLACES = 64
"""Up to so many routed rows, matrices are gathered for each of them, whether or not two name the same expert …"""
GATHERED = 2**24
"""… and up to so many elements of gathered matrices: copying more costs more than the calls it saves."""
PADDED = 2**26
"""Most elements of a padded product, its weights included where they have to be copied."""
FEW_GROUPS = 4


def mul_mat_id(xp: ModuleType, w: WeightSource, x: Any, ids: Any, *, out: Any, rounding: str = "none") -> None:
    """Row (t, i) of the result is expert ids[t, i] applied to row (t, i % rows) of x."""
    (_, n_expert, n, k), (_, t, n_rows, _), n_used = w.shape, x.shape, ids.shape[-1]
    rounds = rounding == "ggml" and rounds_input(w.dtype)
    if rounds or not (blas_layout(x) and x.flags.c_contiguous):
        packed = xp.empty(x.shape, np.float32)
        decode(xp, x, packed)
        if rounds:
            round_input(xp, w.dtype, packed)
        x = packed
    if t * n_used <= FEW_PLACES and t * n_used * n * k <= GATHERED and n_rows in (1, n_used) and hasattr(w, "gather"):
        require_within(ids, n_expert, 2, "expert")
        by_place(xp, w, x[0], ids[0, 0], out[0])
        return
    groups = Groups(xp, ids, n_expert, n_rows)
    rows, results = x.reshape(t * n_rows, k), out.reshape(t * n_used, n)
    if groups.even and groups.padded_rows * (n + k) + len(groups.used) * n * k <= PADDED and hasattr(w, "gather"):
        padded(xp, w, rows, groups, results)
    else:
        in_turn(xp, w, rows, groups, results)


MUL_MAT_ID = Kernel(mul_mat_id)


def by_place(xp: ModuleType, w: Any, x: Any, ids: Any, out: Any) -> None:
    """One matrix for each row of `out` (t, used, n), gathered; x is (t, used or 1, k)."""
    (_, _, n, k), (t, n_used) = w.shape, ids.shape
    stack = w.gather(ids.reshape(-1), xp.empty((t * n_used, n, k), np.float32)).reshape(t, n_used, n, k)
    xp.matmul(stack, x[..., None], out=out[..., None])  # the weights on the left: a transposed stack would be copied


class Groups:
    """Routed rows sorted by expert, on the host and, as one array of indices, on the device.

    used: experts with rows, lowest first; counts, starts: how many rows each has and where they begin. index[0]: places in the
    result, expert by expert; index[1]: the rows of x that they read.
    """

    def __init__(self, xp: ModuleType, ids: Any, n_expert: int, n_rows: int) -> None:
        chosen = ids if xp is np else xp.asnumpy(ids)
        flat, n_used = chosen.reshape(-1), chosen.shape[-1]
        if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < n_expert:
            raise IndexOutOfRange(2, "expert", chosen, n_expert)
        self.places, counts = by_expert(np, flat.astype(id_type(n_expert)), n_expert)
        self.rows = self.places // n_used * n_rows + self.places % n_used % n_rows
        self.used = np.flatnonzero(counts)
        self.counts = counts[self.used]
        self.starts = np.cumsum(self.counts) - self.counts
        self.index = xp.asarray(np.stack([self.places, self.rows]))

    @property
    def padded_rows(self) -> int:
        """Rows of a product in which every group is as long as the longest."""
        return len(self.used) * int(self.counts.max())

    @property
    def even(self) -> bool:
        """Whether padding costs at most as many multiplications again, and saves calls at all."""
        return len(self.used) >= FEW_GROUPS and self.padded_rows <= 2 * len(self.places)


def padded(xp: ModuleType, w: Any, x: Any, groups: Groups, results: Any) -> None:
    """One batched product over all used experts; rows that fill up a group repeat row 0 and are dropped."""
    (_, n_expert, n, k), n_groups = w.shape, len(groups.used)
    longest = groups.padded_rows // n_groups
    group = np.repeat(np.arange(n_groups), groups.counts)
    at = group * longest + np.arange(len(group)) - groups.starts[group]
    table = np.zeros(n_groups * longest, np.int64)
    table[at] = groups.rows
    rows = xp.take(x, xp.asarray(table), axis=0).reshape(n_groups, longest, k)
    if w.direct and n_groups == n_expert:
        stack = w.matrix(0, WHOLE, WHOLE)
    else:
        stack = w.gather(xp.asarray(groups.used), xp.empty((n_groups, n, k), np.float32))
    product = xp.matmul(stack, rows.swapaxes(1, 2)).swapaxes(1, 2).reshape(n_groups * longest, n)
    results[groups.index[0]] = xp.take(product, xp.asarray(at), axis=0)


def in_turn(xp: ModuleType, w: WeightSource, x: Any, groups: Groups, results: Any) -> None:
    """One product for each used expert."""
    n, k = w.shape[2:]
    into = xp.empty(decode_room((1, 1, n, k), w.direct), np.float32)
    only = getattr(w, "only", None)
    for e, start, count in zip(groups.used.tolist(), groups.starts.tolist(), groups.counts.tolist(), strict=True):
        if only is not None and e not in only:
            continue
        places, rows = groups.index[:, start : start + count]
        some = xp.take(x, rows, axis=0)
        product = xp.empty((count, n), np.float32)
        for part in (WHOLE,) if w.direct else cells(WHOLE, n, k):
            xp.matmul(some, w.expert(e, part, into).swapaxes(0, 1), out=product[:, part])
        results[places] = product
