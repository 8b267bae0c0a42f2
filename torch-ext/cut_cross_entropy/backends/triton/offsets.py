"""What the fold knows of a row before it starts: the target's logit, and with label smoothing the sum of all logits.

    offset[i]   = z_y, as a product of vectors: what the exponentials of the row are relative to
    weighted[i] = sum_v w_v z_v = e . (sum_v w_v c_v) + sum_v w_v bias_v, without a softcap

Reads the rows of e and as many of c, and for the sums c once more.
"""

import triton
import triton.language as tl

from .column_sum import column_sum
from .launch import launch
from .logits import logit_arguments, scaled


@triton.jit(do_not_specialize=["V", "ignore_index"])
def offset_kernel(
    e, c, bias, targets, offset, overflow, total, weighted, shift,
    V, D, inner, outer, stride_e, stride_c, ignore_index,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """offset = the target's logit, as a product of vectors; +inf, relative to which nothing counts, where ignored.

    weighted = sum_v w_v z_v, from total = sum_v w_v c_v and shift = sum_v w_v bias_v.
    """
    i_n = tl.program_id(0)
    if overflow is not None:
        tl.store(overflow, 0, mask=i_n == 0)
    y = tl.load(targets + i_n).to(tl.int64)
    valid = (y != ignore_index) & (y >= 0) & (y < V)
    y = tl.where(valid, y, 0)
    b_dot = tl.zeros([BLOCK], dtype=tl.float32)
    b_weighted = tl.zeros([BLOCK], dtype=tl.float32)
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        b_e = tl.load(e + i_n.to(tl.int64) * stride_e + o_d, mask=(o_d < D) & valid, other=0.0)
        b_c = tl.load(c + y * stride_c + o_d, mask=(o_d < D) & valid, other=0.0)
        b_dot += b_e.to(tl.float32) * b_c.to(tl.float32)
        if total is not None:
            b_weighted += b_e.to(tl.float32) * tl.load(total + o_d, mask=o_d < D, other=0.0)
    if total is not None:
        sum_wz = tl.sum(b_weighted, 0)
        if HAS_BIAS:
            sum_wz += tl.load(shift)
        tl.store(weighted + i_n, sum_wz * inner)
    z = tl.sum(b_dot, 0)
    if HAS_BIAS:
        z += tl.load(bias + y).to(tl.float32)
    x, unit = scaled(z, inner, outer, SOFTCAP)
    tl.store(offset + i_n, tl.where(valid, x * unit, float("inf")))


def _weighted_sums(problem):
    """sum_v w_v c_v [D], and sum_v w_v bias_v, in fp32."""
    weight, shift = problem.weight, None
    if problem.bias is not None:
        shift = (problem.bias.float() if weight is None else problem.bias.float() * weight.float()).sum()
    return column_sum(problem.c, weight), shift


def offsets(problem, out, overflow, weighted):
    """Write the offsets [N] and, where these are given, 0 to the int32 [1] `overflow`, sum_v w_v z_v to `weighted`."""
    e, c = problem.e, problem.c
    (bias, *scalars), flags = logit_arguments(problem)
    total, shift = (None, None) if weighted is None else _weighted_sums(problem)
    launch(
        offset_kernel, e.shape[0], e.device, e, c, bias, problem.targets, out, overflow, total, weighted, shift,
        *c.shape, *scalars, e.stride(0), c.stride(0), problem.ignore_index, **flags, BLOCK=1024,
    )  # fmt: skip
