"""The panel of `single_pass`: gradients with respect to the logits up to one factor per row, written by the forward.

    panel[i, v] = 2^(z_v - m)  (v != y),   panel[i, y] = -sum_{v != y} 2^(z_v - m) = s * expm1(-loss)
    dz[i, v]    = factor[i] * panel[i, v],  factor[i] = g_i / s

g_i is the derivative of the loss by that of the row, s the sum over all classes, m the target's logit as `fold` knows
it beforehand. The factor is known only after the whole row, and joins the rows of e and dE instead of the panel: the
panel is written once and read by the two contractions. bf16 and fp32 have the exponents for it, fp16 has not.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ...problem import RowGradients
from .dlogits import dlogits
from .fold import fold
from .launch import launch
from .logits import logit_arguments
from .math import LOG2E, expm1


@triton.jit(do_not_specialize=["N", "ignore_index"])
def factor_kernel(
    targets, nll, m, s, weights, divisor, overflow, panel, factors, N, ignore_index, factor, outer, stride_panel,
    HAS_WEIGHTS: tl.constexpr, HAS_DIVISOR: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_y = tl.load(targets + o_n, mask=o_n < N, other=ignore_index).to(tl.int64)
    valid = b_y != ignore_index
    b_nll = tl.load(nll + o_n, mask=valid, other=0.0)
    b_s = tl.load(s + o_n, mask=valid, other=1.0)
    b_g = tl.full([BLOCK], 1.0, dtype=tl.float32)
    if HAS_WEIGHTS:
        b_g *= tl.load(weights + o_n, mask=valid, other=0.0)
    if HAS_DIVISOR:
        total = tl.load(divisor)
        b_g = tl.where(total == 0.0, 0.0, b_g / total)
    b_x = b_s * expm1(-b_nll)
    if SOFTCAP > 0:
        b_z = (tl.load(m + o_n, mask=valid, other=0.0) + tl.log2(b_s)) - LOG2E * b_nll
        b_x *= 1.0 - (b_z / outer) * (b_z / outer)
    # After an overflow the panel holds the gradient of nll itself.
    relative = tl.load(overflow) == 0
    b_x = b_x.to(panel.dtype.element_ty)
    tl.store(panel + o_n.to(tl.int64) * stride_panel + b_y, b_x, mask=valid & relative)
    b_g = tl.where(relative, b_g * factor / b_s, b_g)
    tl.store(factors + o_n, tl.where(valid, b_g, 0.0), mask=o_n < N)


def exponentials(problem, count, counted, panel, weights, divisor):
    """Fill the panel [N, >= V]. Returns nll and factors, fp32 [N]: dz = factors[:, None] * panel.

    With `counted`, of the first `count` rows alone. The loss is sum_i weights_i * nll_i / divisor; weights [N] and
    divisor 0-d, both fp32, default to 1.
    """
    n, device = problem.e.shape[0], problem.e.device
    rows = torch.arange(n, dtype=torch.int32, device=device)
    every = torch.full((1,), n, dtype=torch.int32, device=device)
    overflow = torch.empty_like(every)
    factors = torch.empty(n, dtype=torch.float32, device=device)
    out = fold(problem, rows, count if counted else every, False, False, False, panel, overflow, counted)
    out = replace(out, count=every)
    one = RowGradients(torch.ones((), device=device).expand(n), None, None, None)
    dlogits(problem, problem.e, out, one, n, None, panel, needed=overflow)(0, problem.c.shape[0])
    (_, _, outer), flags = logit_arguments(problem)
    launch(
        factor_kernel, triton.cdiv(n, 128), device,
        problem.targets, out.nll, out.m, out.s, weights, divisor, overflow, panel, factors, n, problem.ignore_index,
        problem.scale / problem.temperature, outer, panel.stride(0),
        HAS_WEIGHTS=weights is not None, HAS_DIVISOR=divisor is not None, SOFTCAP=flags["SOFTCAP"], BLOCK=128,
    )  # fmt: skip
    return out.nll, factors
