"""From logits to gradients with respect to them: what the kernels that write a panel have in common.

    p_v  = 2^(z_v - m) / s, z and m in units of log2(e)
    dz_v    = nll * (p_v - [v = y]) + rest * p_v - smooth * w_v - entropy * p_v * (log p_v + H)

with the upstream gradients of the row, in fp32, then times dz/d(e.c) and rounded once. At the target's column
p - 1 = expm1(-loss), so that a confident token keeps its gradient.
"""

import triton
import triton.language as tl

from .logits import above
from .math import LN2, LOG2E, exp, expm1


@triton.jit
def row_vector(values, o_m, m_m, stride, PRESENT: tl.constexpr):
    """values[o_m] in fp32, 0 where it is absent or masked."""
    b = tl.where(m_m, 0.0, 0.0)
    if PRESENT:
        b = tl.load(values + o_m * stride, mask=m_m, other=0.0).to(tl.float32)
    return b


@triton.jit
def row_state(
    o_m, state, upstream, strides, factor,
    HAS_UNIT: tl.constexpr, HAS_NLL: tl.constexpr, HAS_REST: tl.constexpr, HAS_SMOOTH: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Of the rows o_m of the compacted e: y, log p_y, m, s, H, and the upstream gradients times `factor`."""
    targets, rows, count, m, s, loss, entropy = state
    g_nll, g_rest, g_smooth, g_entropy, unit = upstream
    s_nll, s_rest, s_smooth, s_entropy = strides
    m_m = o_m < tl.load(count)
    o_n = tl.load(rows + o_m, mask=m_m, other=0).to(tl.int64)
    y = tl.load(targets + o_n, mask=m_m, other=-1).to(tl.int64)
    if HAS_UNIT:
        factor *= tl.load(unit)
    # A row past the count gets p = 0, whatever its logits.
    b_m = tl.where(m_m, row_vector(m, o_n, m_m, 1, True), float("inf"))
    b_s = tl.where(m_m, row_vector(s, o_n, m_m, 1, True), 1.0)
    return (
        y, -row_vector(loss, o_n, m_m, 1, True), b_m, b_s, row_vector(entropy, o_n, m_m, 1, HAS_ENTROPY),
        row_vector(g_nll, o_n, m_m, s_nll, HAS_NLL) * factor, row_vector(g_rest, o_n, m_m, s_rest, HAS_REST) * factor,
        row_vector(g_smooth, o_n, m_m, s_smooth, HAS_SMOOTH) * factor,
        row_vector(g_entropy, o_n, m_m, s_entropy, HAS_ENTROPY) * factor,
    )  # fmt: skip


@triton.jit
def gradient(
    q, log_p, w, t, on_q, smooth, on_entropy, h,
    SOFTCAP: tl.constexpr, HAS_SMOOTH: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """(on_q - on_entropy * (log p + H)) * q - smooth * w, times 1 - t^2 where t is the tanh of a softcap."""
    dz = on_q * q
    if HAS_ENTROPY:
        dz -= on_entropy * q * tl.where(log_p == float("-inf"), 0.0, log_p + h)
    if HAS_SMOOTH:
        dz -= smooth * w
    if SOFTCAP > 0:
        dz *= 1.0 - t * t
    return dz


@triton.jit
def elsewhere(
    b_x, unit, row, weight, o_v, V,
    SOFTCAP: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SMOOTH: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """dz [rows, columns] away from the targets, where q = p = 2^(z - m) / s: the division joins the coefficients."""
    _, _, b_m, b_s, h, nll, rest, smooth, entropy = row
    w = tl.where(o_v < V, 1.0, 1.0)
    if HAS_WEIGHT:
        w = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_above = above(b_x, unit, b_m)
    return gradient(
        tl.exp2(b_above), LN2 * (b_above - tl.log2(b_s)[:, None]), w[None, :], b_x, ((nll + rest) / b_s)[:, None],
        smooth[:, None], (entropy / b_s)[:, None], h[:, None], SOFTCAP, HAS_SMOOTH, HAS_ENTROPY,
    )  # fmt: skip


@triton.jit
def at_target(
    row, weight, outer,
    SOFTCAP: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SMOOTH: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """dz [rows] at the targets, where q = p - 1 = expm1(log p) for the loss."""
    y, log_p, b_m, b_s, h, nll, rest, smooth, entropy = row
    p, w = exp(log_p), tl.where(y >= 0, 1.0, 1.0)
    if HAS_WEIGHT:
        w = tl.load(weight + y, mask=y >= 0, other=0.0).to(tl.float32)
    z = (b_m + tl.log2(b_s)) + LOG2E * log_p
    return gradient(
        1.0, log_p, w, z / outer, nll * expm1(log_p) + rest * p, smooth, entropy * p, h,
        SOFTCAP, HAS_SMOOTH, HAS_ENTROPY,
    )  # fmt: skip
