"""What the fold knows of a row before it starts: the target's logit, and with label smoothing the sum of all logits.

    offset[i]   = z_y, as a product of vectors: what the exponentials of the row are relative to
    weighted[i] = sum_v w_v z_v = e . (sum_v w_v c_v) + sum_v w_v bias_v, without a softcap

Reads the rows of e and as many of c, and for the sums c once more. A block of listed rows is copied on the way.
"""

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from .column_sum import column_sum
from .launch import launch
from .logits import logit_arguments, scaled
from .rows import row_block


@triton.jit(do_not_specialize=["V", "first", "least", "ignore_index"])
def offset_kernel(
    e, c, bias, targets, rows, count, out, out_targets, out_count, offset, total, weighted, shift,
    V, D, first, least, inner, outer, stride_e, stride_c, stride_out, ignore_index,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """offset = the target's logit, as a product of vectors; +inf, relative to which nothing counts, where ignored.

    weighted = sum_v w_v z_v, from total = sum_v w_v c_v and shift = sum_v w_v bias_v. With `rows` of those listed from
    `first` on, which are copied to `out` with their targets; past the count zeros and ignored targets. out_count is how
    many there are, or would be if the count were `least`.
    """
    i_n = tl.program_id(0)
    live, row = i_n >= 0, i_n.to(tl.int64)
    if rows is not None:
        number = tl.load(count)
        live = first + i_n < number
        row = tl.load(rows + first + i_n, mask=live, other=0).to(tl.int64)
        tl.store(out_count, tl.minimum(tl.maximum(number, least) - first, tl.num_programs(0)), mask=i_n == 0)
    y = tl.where(live, tl.load(targets + row).to(tl.int64), ignore_index)
    if out_targets is not None:
        tl.store(out_targets + i_n, y)
    valid = (y != ignore_index) & (y >= 0) & (y < V)
    y = tl.where(valid, y, 0)
    b_dot = tl.zeros([BLOCK], dtype=tl.float32)
    b_weighted = tl.zeros([BLOCK], dtype=tl.float32)
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        b_e = tl.load(e + row * stride_e + o_d, mask=(o_d < D) & valid, other=0.0)
        b_c = tl.load(c + y * stride_c + o_d, mask=(o_d < D) & valid, other=0.0)
        b_dot += b_e.to(tl.float32) * b_c.to(tl.float32)
        if out is not None:
            tl.store(out + i_n.to(tl.int64) * stride_out + o_d, b_e, mask=o_d < D)
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


def offsets(problem, out, weighted):
    """Write the offsets [N] and, where that is given, sum_v w_v z_v to `weighted`."""
    total, shift = (None, None) if weighted is None else _weighted_sums(problem)
    _offsets(problem, problem.e.shape[0], out, total=total, weighted=weighted, shift=shift)


class Blocks:
    """The rows listed, so many at a time: compacted, with their offsets, always in the same tensors.

    Past the count rows are zero, their targets ignored.
    """

    def __init__(self, problem, rows, count, size, buffer, known):
        new = functools.partial(torch.empty, device=problem.e.device)
        targets, offset = new(size, dtype=torch.int64), new(size, dtype=torch.float32)  # any ignore_index fits
        self.block, self.count = replace(problem, e=buffer, targets=targets, offset=offset), new(1, dtype=torch.int32)
        # Where the host does not know the count it goes on to the last row.
        listed = (rows, count, buffer, targets, self.count, 0 if known else rows.numel())
        self.run = functools.partial(_offsets, problem, size, offset, *listed)

    def take(self, i0):
        """The block from row i0 of the list on, and how many rows of it are to be folded, int32 [1]."""
        self.run(first=i0)
        return self.block, self.count


def _offsets(
    problem, n, offset, rows=None, count=None, out=None, out_targets=None, out_count=None, least=0, *,
    first=0, total=None, weighted=None, shift=None,
):  # fmt: skip
    e, c = problem.e, problem.c
    (bias, *scalars), flags = logit_arguments(problem)
    launch(
        offset_kernel, n, e.device, e, c, bias, problem.targets,
        rows, count, out, out_targets, out_count, offset, total, weighted, shift, *c.shape, first, least, *scalars,
        e.stride(0), c.stride(0), 0 if out is None else out.stride(0), problem.ignore_index, **flags,
        BLOCK=min(1024, row_block(e.shape[1])),
    )  # fmt: skip
