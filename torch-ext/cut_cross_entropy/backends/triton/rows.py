"""Which rows count, and moving them: select, compact, expand.

select   reads targets (4 or 8 N bytes), writes the valid rows in order and their count; one program, in order.
compact  reads and writes the valid rows of e (2 * itemsize * n * D bytes).
expand   reads the fp32 accumulator, writes dE: dE[rows[i]] = accumulator[i] / unit.
"""

import torch
import triton
import triton.language as tl

from . import configs
from .launch import launch


@triton.jit(do_not_specialize=["N", "V", "ignore_index"])
def select_kernel(targets, rows, count, in_range, N, V, ignore_index, BLOCK: tl.constexpr):
    total = tl.zeros([], dtype=tl.int32)
    outside = tl.zeros([], dtype=tl.int32)
    for i_n in range(0, N, BLOCK):
        o_n = i_n + tl.arange(0, BLOCK)
        b_y = tl.load(targets + o_n, mask=o_n < N, other=0).to(tl.int64)
        b_valid = (b_y != ignore_index) & (o_n < N)
        outside += tl.sum((b_valid & ((b_y < 0) | (b_y >= V))).to(tl.int32))
        b_at = total + tl.cumsum(b_valid.to(tl.int32), 0) - 1
        tl.store(rows + b_at, o_n, mask=b_valid)
        total += tl.sum(b_valid.to(tl.int32))
    tl.store(count, total)
    tl.store(in_range, (outside == 0).to(tl.int32))


def select(targets, ignore_index, v):
    """The valid rows and their count. A target out of range ends in a device-side assertion, without synchronising."""
    n, device = targets.numel(), targets.device
    rows = torch.empty(n, dtype=torch.int32, device=device)
    count, in_range = torch.empty((2, 1), dtype=torch.int32, device=device).unbind()
    launch(select_kernel, 1, device, targets, rows, count, in_range, n, v, ignore_index, BLOCK=4096, num_warps=16)
    message = f"targets: a value is neither in 0 <= target < V = {v} nor the ignore_index {ignore_index}"
    if device.type == "cpu" and not in_range.item():
        raise IndexError(message)
    torch._assert_async(in_range, message)
    return rows, count


def count_on_host(problem, count):
    """How many rows are valid, and whether that is known.

    Reading it waits for the device. Where that is not worth it, or a capture forbids it, all N rows are taken.
    """
    e, c = problem.e, problem.c
    if e.is_cuda and torch.cuda.is_current_stream_capturing() or configs.is_small(*e.shape, c.shape[0], e.device):
        return e.shape[0], False
    return int(count), True


@triton.jit(do_not_specialize=["D"])
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
    if known and live == e.shape[0]:
        return e
    out = torch.empty((live, e.shape[1]), dtype=e.dtype, device=e.device) if de is None else de[:live]
    launch(compact_kernel, live, e.device, e, rows, count, out, e.shape[1], e.stride(0), out.stride(0), BLOCK=1024)
    return out


@triton.jit(do_not_specialize=["D"])
def expand_kernel(accumulator, rows, count, unit, de, D, HAS_UNIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    live = i < tl.load(count)
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    undo = 1.0
    if HAS_UNIT:
        undo = 1.0 / tl.load(unit)
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        b_a = tl.load(accumulator + i.to(tl.int64) * D + o_d, mask=(o_d < D) & live, other=0.0)
        tl.store(de + row * D + o_d, (b_a * undo).to(de.dtype.element_ty), mask=(o_d < D) & live)


def expand(accumulator, rows, count, live, known, unit, de):
    """dE rows, rounded once; exactly 0 where the target is ignored."""
    n, d = de.shape
    if known and live == n and unit is None:
        de.copy_(accumulator)
        return
    de.zero_()
    launch(
        expand_kernel, live, de.device, accumulator, rows, count, unit, de, d, HAS_UNIT=unit is not None, BLOCK=1024
    )
