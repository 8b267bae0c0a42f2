"""Which rows count, and moving them: select, compact, expand.

select   reads targets (4 or 8 N bytes), writes the valid rows in order, from the end the others, and the count of the
         valid ones; one program, in order.
compact  reads and writes the valid rows of e (2 * itemsize * n * D bytes).
expand   reads an fp32 accumulator, writes dE: dE[rows[i]] = accumulator[i] * factor[i] / unit, and 0 past the count.
"""

import torch
import triton
import triton.language as tl

from . import configs
from .launch import cdiv, launch


@triton.jit(do_not_specialize=["N", "V", "ignore_index"])
def select_kernel(targets, rows, count, in_range, N, V, ignore_index, BLOCK: tl.constexpr):
    total = tl.zeros([], dtype=tl.int32)
    outside = tl.zeros([], dtype=tl.int32)
    for i_n in range(0, N, BLOCK):
        o_n = i_n + tl.arange(0, BLOCK)
        b_y = tl.load(targets + o_n, mask=o_n < N, other=0).to(tl.int64)
        b_valid = (b_y != ignore_index) & (o_n < N)
        outside += tl.sum((b_valid & ((b_y < 0) | (b_y >= V))).to(tl.int32))
        b_upto = total + tl.cumsum(b_valid.to(tl.int32), 0)
        tl.store(rows + tl.where(b_valid, b_upto - 1, N - 1 - (o_n - b_upto)), o_n, mask=o_n < N)
        total += tl.sum(b_valid.to(tl.int32))
    tl.store(count, total)
    tl.store(in_range, (outside == 0).to(tl.int32))


def select(targets, ignore_index, v):
    """All rows, the valid ones first, and how many those are.

    A target out of range ends in a device-side assertion, without synchronising.
    """
    n, device = targets.numel(), targets.device
    rows = torch.empty(n, dtype=torch.int32, device=device)
    count, in_range = torch.empty((2, 1), dtype=torch.int32, device=device).unbind()
    launch(select_kernel, 1, device, targets, rows, count, in_range, n, v, ignore_index, BLOCK=4096, num_warps=16)
    message = f"targets: a value is neither in 0 <= target < V = {v} nor the ignore_index {ignore_index}"
    if device.type == "cpu" and not in_range.item():
        raise IndexError(message)
    torch._assert_async(in_range, message)
    return rows, count


def reads_count(problem):
    """Whether the count of valid rows will be read. That waits for the device: in small passes it is not worth it, and
    a capture forbids it. All N rows are taken then.
    """
    e, c = problem.e, problem.c
    capturing = e.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (capturing or configs.is_small(*e.shape, c.shape[0], e.device))


class count_later:
    """The count of valid rows, on its way to the host without a wait for what is enqueued after this.

    Where it is not read, not `known`, it is N.
    """

    now = None

    def __init__(self, problem, count):
        self.known, self.count = reads_count(problem), problem.e.shape[0]
        if self.known and count.is_cuda:
            self.count = torch.empty(count.shape, dtype=count.dtype, pin_memory=True).copy_(count, non_blocking=True)
            self.event = torch.cuda.current_stream(count.device).record_event()
        elif self.known:
            self.count = count

    def wait(self):
        if self.known and self.count.is_pinned():
            self.event.synchronize()
        return int(self.count)


def row_block(d):
    """Columns that a program of one row takes at a time."""
    return min(4096, 1 << max(d - 1, 0).bit_length())


@triton.jit
def compact_kernel(e, rows, count, out, D, stride_e, stride_out, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    live = i < tl.load(count)
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        b_e = tl.load(e + row * stride_e + o_d, mask=(o_d < D) & live, other=0.0)
        tl.store(out + i.to(tl.int64) * stride_out + o_d, b_e, mask=o_d < D)


def compact(e, rows, count, live, known, de):
    """The valid rows, contiguous, and zeros past the count: in the storage of dE, which is written at the end."""
    n, d = e.shape
    if known and live == n:
        return e
    out = torch.empty((live, d), dtype=e.dtype, device=e.device) if de is None else de[:live]
    launch(compact_kernel, live, e.device, e, rows, count, out, d, e.stride(0), out.stride(0), BLOCK=row_block(d))
    return out


def new_rows(e, block, chunk):
    """Two views of one storage: [block, D] in the dtype of e, and [block, chunk] in fp32, at least half as wide."""
    wide = torch.empty((block, chunk), dtype=torch.float32, device=e.device)
    return wide.view(-1).view(e.dtype)[: block * e.shape[1]].view(block, e.shape[1]), wide


@triton.jit(do_not_specialize=["first"])
def expand_kernel(
    accumulator, rows, count, unit, factor, less, vector, de, D, first, stride_de, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    live, row = i >= 0, i.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + first + i).to(tl.int64)
    if count is not None:
        live = first + i < tl.load(count)
    scale = 1.0
    if unit is not None:
        scale = 1.0 / tl.load(unit)
    if factor is not None:
        scale *= tl.load(factor + i)
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        b_a = tl.load(accumulator + i.to(tl.int64) * D + o_d, mask=(o_d < D) & live, other=0.0)
        b_de = b_a.to(tl.float32) * scale
        if less is not None:
            b_de -= tl.load(less + i) * tl.load(vector + o_d, mask=o_d < D, other=0.0)
        tl.store(de + row * stride_de + o_d, tl.where(live, b_de, 0.0).to(de.dtype.element_ty), mask=o_d < D)


def expand(accumulator, rows, count, live, known, unit, de):
    """dE, rounded once; exactly 0 where the target is ignored."""
    if known and live == de.shape[0] and unit is None:
        de.copy_(accumulator)
    else:
        _expand(de.shape[0], accumulator, de, rows, count, unit=unit)


def expand_block(accumulator, rows, count, first, factors, de, less=None):
    """dE[rows[first + i]] = accumulator[i] * factors[i] - less[0][i] * less[1], rounded once, and 0 past the count."""
    _expand(accumulator.shape[0], accumulator, de, rows, count, factors=factors, less=less, first=first)


def write_rows(total, out, at=None, less=None):
    """out[at[i]] = total[i] - less[0][i] * less[1], in fp32, rounded once. Without `at` out[i], which may be total."""
    _expand(total.shape[0], total, out, at, less=less)


def scale_rows(rows, factors, less=None):
    """rows[i] = rows[i] * factors[i] - less[0][i] * less[1], of contiguous rows."""
    _expand(rows.shape[0], rows, rows, factors=factors, less=less)


def _expand(n, accumulator, out, rows=None, count=None, *, unit=None, factors=None, less=None, first=0):
    launch(
        expand_kernel, n, out.device, accumulator, rows, count, unit, factors, *(less or (None, None)), out,
        out.shape[1], first, out.stride(0), BLOCK=row_block(out.shape[1]),
    )  # fmt: skip


@triton.jit
def _scale(gradient, size, factor, BLOCK: tl.constexpr):
    for i in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0).to(tl.int64) * BLOCK):
        o = i + tl.arange(0, BLOCK)
        b = tl.load(gradient + o, mask=o < size, other=0.0).to(tl.float32)
        b = tl.where(b == 0.0, 0.0, b * factor)
        tl.store(gradient + o, b.to(gradient.dtype.element_ty), mask=o < size)


@triton.jit
def scale_kernel(upstream, de, dc, dbias, size_e, size_c, size_bias, BLOCK: tl.constexpr):
    factor = tl.load(upstream)
    if factor == 1.0:
        return
    if de is not None:
        _scale(de, size_e, factor, BLOCK)
    if dc is not None:
        _scale(dc, size_c, factor, BLOCK)
    if dbias is not None:
        _scale(dbias, size_bias, factor, BLOCK)


def scale(upstream, de, dc, dbias):
    """Multiply contiguous gradients, or None, by a 0-d upstream gradient, in place.

    An upstream of 1 costs no traffic and no wait. A gradient of 0, as of an ignored row, stays 0 whatever the upstream.
    """
    gradients, device = (de, dc, dbias), upstream.device
    sizes = [0 if gradient is None else gradient.numel() for gradient in gradients]
    programs = min(8 * configs.processors_of(device), cdiv(max(sizes), 4096))
    if programs:
        launch(scale_kernel, programs, device, upstream.float(), *gradients, *sizes, BLOCK=4096, num_warps=8)
