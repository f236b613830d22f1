"""The slow definitions of what only training uses, in f64 over whole arrays; see `reference`."""

from __future__ import annotations

import numpy as np

from workbench.kernels.kernel import reference
from workbench.kernels.reference import Array, real
from workbench.tensors.tensor import Tensor


@reference("ACC")
def acc(node: Tensor, a: Array, b: Array) -> Array:
    """a, with element (i, j, k, l) of b added at byte offset + 4 i + nb1 j + nb2 k + nb3 l."""
    flat = real(a).reshape(-1)
    steps = (*node.params["nb"][::-1], 4)
    for index in np.ndindex(b.shape):
        flat[(node.params["offset"] + sum(i * s for i, s in zip(index, steps, strict=True))) // 4] += b[index]
    return flat.reshape(a.shape)


@reference("REPEAT_BACK")
def repeat_back(node: Tensor, a: Array) -> Array:
    """Index i of the result is the sum over all indices of a that are i modulo its extents."""
    out = np.zeros(node.ne[::-1])
    for index in np.ndindex(a.shape):
        out[tuple(i % n for i, n in zip(index, out.shape, strict=True))] += a[index]
    return out


@reference("SILU_BACK")
def silu_back(node: Tensor, grad: Array, x: Array) -> Array:
    """grad times the derivative of x · s(x), which is s + x · s · (1 - s)."""
    s = 1 / (1 + np.exp(-real(x)))
    return real(grad) * (s + x * s * (1 - s))


@reference("RMS_NORM_BACK")
def rms_norm_back(node: Tensor, grad: Array, x: Array) -> Array:
    """y = x / r with r = √(mean of x² + eps), so dx = grad / r - x · (grad · x) / (n r³)."""
    g, a = real(grad), real(x)
    r = np.sqrt((a**2).mean(axis=-1, keepdims=True) + node.params["eps"])
    return g / r - a * (g * a).sum(axis=-1, keepdims=True) / (a.shape[-1] * r**3)


@reference("SOFT_MAX_BACK")
def soft_max_back(node: Tensor, grad: Array, y: Array) -> Array:
    """The derivative of y_i with respect to x_j is y_i · (1 if i = j, else 0) - y_i · y_j."""
    g, p = real(grad), real(y)
    return node.params["scale"] * (p * g - p * (p * g).sum(axis=-1, keepdims=True))


@reference("CROSS_ENTROPY_LOSS_BACK")
def cross_entropy_loss_back(node: Tensor, grad: Array, logits: Array, labels: Array) -> Array:
    """The derivative of -labels · (x - log sum exp x) is soft max · sum(labels) - labels, and the loss is the mean over rows."""
    x = real(logits)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return real(grad).item() * (p * real(labels).sum(axis=-1, keepdims=True) - labels) / (x.size // x.shape[-1])


@reference("GET_ROWS_BACK")
def get_rows_back(node: Tensor, grad: Array, rows: Array) -> Array:
    """Zero, and each row of grad added to the row that was read."""
    out = np.zeros(node.ne[::-1])
    for i3, i2, i in np.ndindex(grad.shape[:3]):
        out[i3, i2, rows[0, i3, i2, i]] += grad[i3, i2, i]
    return out


@reference("MUL_MAT_ID_BACK")
def mul_mat_id_back(node: Tensor, w: Array, grad: Array, ids: Array) -> Array:
    """Row (i, t) is row (i, t) of grad times the matrix of expert ids[i, t]."""
    out = np.empty(node.ne[::-1])
    for t, i in np.ndindex(out.shape[1:3]):
        out[0, t, i] = real(grad[0, t, i]) @ real(w[0, ids[0, 0, t, i]])
    return out


@reference("OUT_PROD_ID")
def out_prod_id(node: Tensor, x: Array, grad: Array, ids: Array) -> Array:
    """The outer product of row (i, t) of grad and the row of x that it belongs to, added to expert ids[i, t]."""
    out = np.zeros(node.ne[::-1])
    for t, i in np.ndindex(grad.shape[1:3]):
        out[0, ids[0, 0, t, i]] += np.outer(real(grad[0, t, i]), real(x[0, t, i % x.shape[2]]))
    return out


@reference("OPT_STEP_ADAMW")
def opt_step_adamw(node: Tensor, w: Array, grad: Array, m: Array, v: Array, params: Array) -> Array:
    """The parameter after the step, from the momenta before it."""
    rate, beta1, beta2, eps, decay, start1, start2 = real(params).ravel()
    g = real(grad)
    m, v = beta1 * real(m) + (1 - beta1) * g, beta2 * real(v) + (1 - beta2) * g * g
    return real(w) * (1 - rate * decay) - rate * (m * start1) / (np.sqrt(v * start2) + eps)
