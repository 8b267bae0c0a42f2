"""A tile of logits: the matrix product on the tensor cores, and what turns a dot product into a logit.

z [BM, BN] = softcap * tanh((e[rows] @ c[columns].T + bias) * scale / softcap) / temperature, in fp32 and in units of
log2(e), so that an exponential is one power of two. It stays a product x * unit up to `above`.
"""

import math

import triton
import triton.language as tl

from .math import quotient, tanh


@triton.jit
def grouped(i, blocks, others, GROUP: tl.constexpr):
    """Program number -> (row block, other index): GROUP row blocks run side by side for each other index."""
    first = i // (GROUP * others) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    j = i - first * others
    return first + j % size, j // size


@triton.jit
def tile_dot(
    e,  # [N, D], a descriptor where E_DESCRIPTOR
    c,  # [V, D], a descriptor where C_DESCRIPTOR
    i_m, o_m,  # first row of the tile; the rows themselves [BM] int64 where e is a pointer
    i_v, V, D, stride_e, stride_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e[rows] @ c[i_v : i_v + BN].T. Rows and columns past the end repeat the last one; the caller masks them."""
    o_v = tl.minimum(i_v + tl.arange(0, BN), V - 1).to(tl.int64)
    b_z = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, D, BK):
        o_k = i_k + tl.arange(0, BK)
        if E_DESCRIPTOR:
            b_e = e.load([i_m, i_k])
        elif EVEN_D:
            b_e = tl.load(e + o_m[:, None] * stride_e + o_k[None, :])
        else:
            b_e = tl.load(e + o_m[:, None] * stride_e + o_k[None, :], mask=(o_k < D)[None, :], other=0.0)
        if C_DESCRIPTOR:
            b_c = c.load([i_v, i_k])
        elif EVEN_D:
            b_c = tl.load(c + o_v[:, None] * stride_c + o_k[None, :])
        else:
            b_c = tl.load(c + o_v[:, None] * stride_c + o_k[None, :], mask=(o_k < D)[None, :], other=0.0)
        b_z = tl.dot(b_e, b_c.T, b_z, input_precision=PRECISION)
    return b_z


@triton.jit
def scaled(b_dot, inner, outer, SOFTCAP: tl.constexpr):
    """(x, unit) of a logit x * unit. Under a softcap x is the tanh; inner is times 2 log2(e) where SOFTCAP is 1."""
    b_x, unit = b_dot, inner
    if SOFTCAP == 1:
        b_x, unit = 1.0 - quotient(2.0, 1.0 + tl.exp2(b_dot * inner)), outer
    elif SOFTCAP == 2:
        b_x, unit = tanh(b_dot * inner), outer
    return b_x, unit


@triton.jit
def transform(b_dot, bias, o_v, V, inner, outer, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Dot products -> (x, unit): a logit is x * unit, in units of log2(e)."""
    if HAS_BIAS:
        b_dot += tl.load(bias + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    return scaled(b_dot, inner, outer, SOFTCAP)


@triton.jit
def above(b_x, unit, b_m):
    """z - m, rounded once: left to fuse product and difference or not, the compiler would do it kernel by kernel.

    Forward and backward have to round alike, or the p of a row sum to 1 only up to 2^-24 of its largest logit. It is
    also the first use of the accumulator, and unconditional: in a branch, every matrix product would be waited for.
    """
    return tl.fma(b_x, unit, -b_m[:, None])


@triton.jit
def store_tile(panel, b_tile, i_m, i_column, rows, columns, stride, BM: tl.constexpr, BN: tl.constexpr,
               DESCRIPTOR: tl.constexpr):  # fmt: skip
    """panel[i_m : i_m + BM, i_column : i_column + BN] = b_tile, rounded to the panel's dtype, up to [rows, columns]."""
    if DESCRIPTOR:
        panel.store([i_m, i_column], b_tile.to(panel.dtype))
    else:
        o_m, o_column = i_m + tl.arange(0, BM), i_column + tl.arange(0, BN)
        p_panel = panel + o_m.to(tl.int64)[:, None] * stride + o_column[None, :]
        m_panel = (o_m < rows)[:, None] & (o_column < columns)[None, :]
        tl.store(p_panel, b_tile.to(panel.dtype.element_ty), mask=m_panel)


def softcap_kind(problem):
    """0: none. 1: tanh(x) = 1 - 2 / (1 + exp(2 x)), which is off by 2e-7 of the softcap, as much as 16-bit inputs and a
    softcap of 32 can bear. 2: tanh to full relative precision.
    """
    if problem.softcap is None:
        return 0
    return 1 if problem.softcap <= 32.0 and problem.e.dtype.itemsize == 2 else 2


def logit_arguments(problem):
    """Run-time scalars (bias, inner, outer) and compile-time flags of `transform`."""
    unit = math.log2(math.e) / problem.temperature
    softcap = softcap_kind(problem)
    if softcap == 0:
        # Not 0: times 0, the -inf of an excluded class or a pad lane would be NaN.
        inner, outer = problem.scale * unit or 2.0**-126, 1.0
    else:
        inner, outer = problem.scale / problem.softcap, problem.softcap * unit
        inner *= 2.0 * math.log2(math.e) if softcap == 1 else 1.0
    return (problem.bias, inner, outer), dict(HAS_BIAS=problem.bias is not None, SOFTCAP=softcap)
