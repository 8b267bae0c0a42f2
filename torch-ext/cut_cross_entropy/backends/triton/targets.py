"""The targets' part of dC on its own, where dC is summed over blocks of tokens in 16 bits.

    dC_v = sum_i factor_i * panel[i, v] * e_i,  of which the tokens with y_i = v are  sum_i share_i * e_i

Of a class with few targets those are a few large terms beside small ones from every other token. Summed together and
rounded after each block, the small ones would be rounded to the spacing of the large. So their entries are taken out of
the panel while dC is contracted, put back for dE, and what they add to dC is added once, at the end, in fp32.

Reads and writes one entry a row of each panel, then once the rows of e and twice those of dC that are targets.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch
from .rows import row_block

BLOCK = 128


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def take_targets_kernel(
    panel, targets, frequent, factors, entries, shares, rows, ignore_index, stride, BLOCK: tl.constexpr
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < rows
    y = tl.load(targets + o_n, mask=m_n, other=0).to(tl.int64)
    m_y = m_n & (y != ignore_index)
    m_y = m_y & (tl.load(frequent + y, mask=m_y, other=1) == 0)
    p_x = panel + o_n.to(tl.int64) * stride + y
    b_x = tl.load(p_x, mask=m_y, other=0.0)
    tl.store(p_x, tl.zeros_like(b_x), mask=m_y)
    tl.store(entries + o_n, b_x, mask=m_n)
    tl.store(shares + o_n, b_x.to(tl.float32) * tl.load(factors + o_n, mask=m_n, other=0.0), mask=m_n)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def put_targets_kernel(panel, targets, entries, rows, ignore_index, stride, BLOCK: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < rows
    y = tl.load(targets + o_n, mask=m_n, other=0).to(tl.int64)
    b_x = tl.load(entries + o_n, mask=m_n, other=0.0)
    tl.store(panel + o_n.to(tl.int64) * stride + y, b_x, mask=m_n & (y != ignore_index) & (b_x != 0.0))


def take_targets(problem, panel, frequent, factors, shares):
    """Set panel[i, y_i] to 0 and shares[i] to factors[i] * what it was, but 0 where frequent[y_i].

    Returns a function that undoes it.
    """
    rows, device = panel.shape[0], panel.device
    entries = torch.empty(rows, dtype=panel.dtype, device=device)
    sizes, programs = (rows, problem.ignore_index, panel.stride(0)), cdiv(rows, BLOCK)
    launch(
        take_targets_kernel, programs, device, panel, problem.targets, frequent, factors, entries, shares, *sizes,
        BLOCK=BLOCK,
    )  # fmt: skip
    return lambda: launch(
        put_targets_kernel, programs, device, panel, problem.targets, entries, *sizes, BLOCK=BLOCK
    )  # fmt: skip


@triton.jit(do_not_specialize=["N", "ignore_index"])
def add_targets_kernel(
    targets, order, rows, frequent, shares, e, dc, N, ignore_index, D, stride_e, BLOCK: tl.constexpr
):  # fmt: skip
    """The first of the sorted targets that are alike adds what all of them do, in their order."""
    k = tl.program_id(0)
    y = tl.load(targets + k)
    before = tl.load(targets + k - 1, mask=k > 0, other=ignore_index)
    if (y == ignore_index) | (y == before):
        return
    if tl.load(frequent + y) != 0:
        return
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        p_dc = dc + y * D + o_d
        b_dc = tl.load(p_dc, mask=o_d < D, other=0.0).to(tl.float32)
        j, here = k, y
        while here == y:
            i = tl.load(order + j)
            row = tl.load(rows + i).to(tl.int64)
            b_e = tl.load(e + row * stride_e + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            b_dc += tl.load(shares + i) * b_e
            j += 1
            here = tl.load(targets + j, mask=j < N, other=ignore_index)
        tl.store(p_dc, b_dc.to(dc.dtype.element_ty), mask=o_d < D)


def add_targets(problem, rows, frequent, shares, dc):
    """dC[y] += sum of shares[i] * e[rows[i]] over the targets y of few tokens, rounded once."""
    n, d = problem.e.shape
    targets, order = problem.targets[rows.long()].long().sort(stable=True)
    launch(
        add_targets_kernel, n, dc.device, targets, order, rows, frequent, shares, problem.e, dc,
        n, problem.ignore_index, d, problem.e.stride(0), BLOCK=row_block(d),
    )  # fmt: skip
