"""The panel of `single_pass`: gradients with respect to the logits up to one factor per row, written by the forward.

    panel[i, v] = 2^(z_v - m)  (v != y),   panel[i, y] = -sum_{v != y} 2^(z_v - m) = s * expm1(-loss)
    dz[i, v]    = factor[i] * panel[i, v],  factor[i] = nll_i / s

nll_i is the derivative by the loss of the row, s the sum over all classes, m the target's logit as `fold` knows it
beforehand. The factor is known only after the whole row, and joins the rows of e and dE instead of the panel: the panel
is written once and read by the two contractions. bf16 and fp32 have the exponents for it, fp16 has not.

The target's entry is as large as all others together. What rounding did to it is taken back by the factor, so that of
this entry the product is exact; the others, a small part of the row's norm, are off by two roundings.

With a penalty on lse or label smoothing there is a `rest_i` that multiplies p besides: then

    factor[i] = g_i / s,  g_i = nll_i + rest_i      panel[i, y] = s * (nll_i * expm1(-loss) + rest_i * exp(-loss)) / g_i

|g_i| is taken to be at least 2^-24 |nll_i|, and divided by as 1 where both are 0: at the target that cancels, and
elsewhere it is less than what fp32 rounds off beside nll_i.
"""

import torch
import triton
import triton.language as tl

from .dlogits import dlogits
from .fold import fold
from .launch import launch
from .logits import logit_arguments
from .math import LOG2E, exp, expm1
from .rows import row_block


@triton.jit(do_not_specialize=["columns", "ignore_index", "s_nll", "s_rest"])
def factor_kernel(
    targets, loss, m, s, g_nll, g_rest, overflow, panel, factors, e, scaled,
    columns, D, ignore_index, factor, outer, stride_panel, stride_e, stride_scaled, s_nll, s_rest,
    HAS_REST: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its factor, the target's entry of the panel, and where `scaled` is given factor * e."""
    i = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + i).to(tl.int64)
    valid = y != ignore_index
    b_loss = tl.load(loss + i, mask=valid, other=0.0)
    b_s = tl.load(s + i, mask=valid, other=1.0)
    b_g = tl.load(g_nll + i * s_nll, mask=valid, other=0.0)
    b_x = expm1(-b_loss)
    if HAS_REST:
        b_nll, b_rest = b_g, tl.load(g_rest + i * s_rest, mask=valid, other=0.0)
        b_g, b_least = b_nll + b_rest, tl.abs(b_nll) * 2.0**-24
        b_g = tl.where(tl.abs(b_g) < b_least, b_least, b_g)
        b_x = (b_nll * b_x + b_rest * exp(-b_loss)) / tl.where(b_g == 0.0, 1.0, b_g)
    b_x *= b_s
    if SOFTCAP > 0:
        b_z = (tl.load(m + i, mask=valid, other=0.0) + tl.log2(b_s)) - LOG2E * b_loss
        b_x *= 1.0 - (b_z / outer) * (b_z / outer)
    # After an overflow the panel holds the gradient itself.
    relative = tl.load(overflow) == 0
    inside = y < columns
    b_stored = b_x.to(panel.dtype.element_ty)
    tl.store(panel + i * stride_panel + y, b_stored, mask=valid & inside & relative)
    b_stored = b_stored.to(tl.float32)
    exact = (b_stored == 0.0) | (inside == 0)
    b_g *= tl.where(exact, 1.0, b_x) / tl.where(exact, 1.0, b_stored)
    b_g = tl.where(relative, b_g * factor / b_s, 1.0)
    b_g = tl.where(valid, b_g, 0.0)
    tl.store(factors + i, b_g)
    if scaled is not None:
        for i_d in range(0, D, BLOCK):
            o_d = i_d + tl.arange(0, BLOCK)
            b_e = tl.load(e + i * stride_e + o_d, mask=o_d < D, other=0.0).to(tl.float32) * b_g
            tl.store(scaled + i * stride_scaled + o_d, b_e.to(scaled.dtype.element_ty), mask=o_d < D)


def factors(problem, fold, upstream, panel, scaled, tape=None):
    """[N], such that dz = factors[:, None] * panel for every row; the targets' entries of the panel are written now.

    Where `scaled` [N, D] is given, it becomes factors[:, None] * e; it may be e.
    """
    e, (_, columns) = problem.e, panel.shape
    n, d = e.shape
    out = torch.empty(n, dtype=torch.float32, device=panel.device)
    rewrite = dlogits(problem, e, fold, upstream, n, None, panel, needed=fold.overflow, tape=tape)
    rewrite(0, min(columns, problem.c.shape[0]))
    (_, _, outer), flags = logit_arguments(problem)
    rest = upstream.rest
    launch(
        factor_kernel, n, panel.device,
        problem.targets, fold.nll, fold.m, fold.s, upstream.nll, rest, fold.overflow, panel, out, e, scaled,
        columns, d, problem.ignore_index, problem.scale / problem.temperature, outer,
        panel.stride(0), e.stride(0), 0 if scaled is None else scaled.stride(0),
        upstream.nll.stride(0), 0 if rest is None else rest.stride(0),
        HAS_REST=rest is not None, SOFTCAP=flags["SOFTCAP"], BLOCK=row_block(d), tape=tape,
    )  # fmt: skip
    return out


def exponentials(problem, count, panel, coefficients, scaled):
    """Fill the panel [N, >= V] for the first `count` rows. Returns nll, lse and factors, [N]:
    dz = factors[:, None] * panel. Where `scaled` is given, it becomes factors[:, None] * e.

    The last that is returned is a function that does the same again for what problem and count hold by then, or None
    where coefficients differ from row to row.
    """
    tape = []
    out = fold(problem, None, count, False, False, False, panel, tape)
    out = out._replace(rows=torch.arange(problem.e.shape[0], dtype=torch.int32, device=panel.device))
    # The last block of tokens may have fewer rows than its tensors.
    upstream = coefficients.gradients(problem, out.lse[: len(coefficients.nll)])
    row_factors = factors(problem, out, upstream, panel, scaled, tape)

    def again():
        out.overflow.zero_()
        for run in tape:
            run()

    same = upstream.rest is None and upstream.nll.stride(0) == 0
    return out.nll, out.lse, row_factors, again if same else None
