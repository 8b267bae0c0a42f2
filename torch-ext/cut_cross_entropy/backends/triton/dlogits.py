"""The panel of gradients with respect to the logits, rebuilt from e, c and the row state.

    p_v  = 2^(z_v - m) / s, z and m in units of log2(e)
    dz_v    = nll * (p_v - [v = y]) + rest * p_v - smooth * w_v - entropy * p_v * (log p_v + H)

with the upstream gradients of the row, in fp32, then times dz/d(e.c) and rounded once. At the target's column
p - 1 = expm1(-loss), so that a confident token keeps its gradient. Reads e and c[panel], 20 to 40 bytes per row; writes
itemsize * n * BV bytes.
"""

import torch
import triton
import triton.language as tl

from . import configs
from .launch import launch
from .logits import above, grouped, logit_arguments, softcap_kind, store_tile, tile_dot, transform
from .math import LN2, LOG2E, exp, expm1


@triton.jit
def row_vector(values, o_m, m_m, stride, PRESENT: tl.constexpr):
    """values[o_m] in fp32, 0 where it is absent or masked."""
    b = tl.zeros(o_m.shape, dtype=tl.float32)
    if PRESENT:
        b = tl.load(values + o_m * stride, mask=m_m, other=0.0).to(tl.float32)
    return b


@triton.jit
def gradient(
    q, log_p, w, t, a, smooth, entropy, h,
    SOFTCAP: tl.constexpr, HAS_SMOOTH: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """(a - entropy * (log p + H)) * q - smooth * w, times 1 - t^2 where t is the tanh of a softcap."""
    dz = a * q
    if HAS_ENTROPY:
        dz -= entropy * q * tl.where(log_p == float("-inf"), 0.0, log_p + h)
    if HAS_SMOOTH:
        dz -= smooth * w
    if SOFTCAP > 0:
        dz *= 1.0 - t * t
    return dz


@triton.jit(do_not_specialize=["live", "V", "width", "i_v0", "s_nll", "s_rest", "s_smooth", "s_entropy"])
def dlogits_kernel(
    e, c, bias, weight, panel, needed,
    targets, rows, count, m, s, loss, entropy,  # row state
    g_nll, g_rest, g_smooth, g_entropy, unit,  # upstream gradients [N]
    live, V, D, width, i_v0, inner, outer, factor,
    stride_e, stride_c, stride_panel, s_nll, s_rest, s_smooth, s_entropy,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, PANEL_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_UNIT: tl.constexpr,
    HAS_NLL: tl.constexpr, HAS_REST: tl.constexpr, HAS_SMOOTH: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    if needed is not None:
        if tl.load(needed) == 0:
            return
    blocks, columns = tl.cdiv(live, BM), tl.cdiv(width, BN)
    for i in tl.range(tl.program_id(0), blocks * columns, tl.num_programs(0), flatten=FLATTEN):
        i_m, i_t = grouped(i, blocks, columns, GROUP)
        i_m = i_m * BM
        i_v = i_v0 + i_t * BN
        o_m = i_m + tl.arange(0, BM)
        o_v = i_v + tl.arange(0, BN)
        b_dot = tile_dot(
            e, c, i_m, tl.minimum(o_m, live - 1).to(tl.int64), i_v, V, D, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION,
        )  # fmt: skip
        b_x, unit_x = transform(b_dot, bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)

        m_m = o_m < tl.load(count)
        o_n = tl.load(rows + o_m, mask=m_m, other=0).to(tl.int64)
        b_y = tl.load(targets + o_n, mask=m_m, other=-1).to(tl.int64)
        b_scale = factor
        if HAS_UNIT:
            b_scale = factor * tl.load(unit)
        b_nll = row_vector(g_nll, o_n, m_m, s_nll, HAS_NLL) * b_scale
        b_rest = row_vector(g_rest, o_n, m_m, s_rest, HAS_REST) * b_scale

        b_smooth = row_vector(g_smooth, o_n, m_m, s_smooth, HAS_SMOOTH) * b_scale
        b_entropy = row_vector(g_entropy, o_n, m_m, s_entropy, HAS_ENTROPY) * b_scale
        b_h = row_vector(entropy, o_n, m_m, 1, HAS_ENTROPY)
        # A row past the count gets p = 0, whatever its logits.
        b_m = tl.where(m_m, row_vector(m, o_n, m_m, 1, True), float("inf"))
        b_s = tl.where(m_m, row_vector(s, o_n, m_m, 1, True), 1.0)
        b_w = tl.full([BN], 1.0, dtype=tl.float32)
        if HAS_WEIGHT:
            b_w = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)

        # Away from the target q = p = 2^(z - m) / s: the division joins the coefficients of the row.
        b_above = above(b_x, unit_x, b_m)
        b_dz = gradient(
            tl.exp2(b_above), LN2 * (b_above - tl.log2(b_s)[:, None]), b_w[None, :], b_x,
            ((b_nll + b_rest) / b_s)[:, None], b_smooth[:, None],
            (b_entropy / b_s)[:, None], b_h[:, None], SOFTCAP, HAS_SMOOTH, HAS_ENTROPY,
        )  # fmt: skip
        if tl.max(((b_y >= i_v) & (b_y < i_v + BN)).to(tl.int32)) == 1:
            b_log_py = -row_vector(loss, o_n, m_m, 1, True)
            b_py = exp(b_log_py)
            b_wy = tl.full([BM], 1.0, dtype=tl.float32)
            if HAS_WEIGHT:
                b_wy = row_vector(weight, tl.maximum(b_y, 0), m_m, 1, True)
            b_zy = (b_m + tl.log2(b_s)) + LOG2E * b_log_py
            b_dzy = gradient(
                1.0, b_log_py, b_wy, b_zy / outer, b_nll * expm1(b_log_py) + b_rest * b_py,
                b_smooth, b_entropy * b_py, b_h, SOFTCAP, HAS_SMOOTH, HAS_ENTROPY,
            )  # fmt: skip
            b_dz = tl.where(o_v[None, :] == b_y[:, None], b_dzy[:, None], b_dz)
        store_tile(panel, b_dz, i_m, i_t * BN, live, width, stride_panel, BM, BN, PANEL_DESCRIPTOR)


def dlogits(problem, e, fold, gradients, live, unit, panel, needed=None):
    """Returns write(v0, v1): panel[:, : v1 - v0] = dz of the columns v0 to v1 for the `live` rows of a compacted e.

    Where the int32 [1] `needed` is 0 when that runs, nothing is written.
    """
    c, device = problem.c, e.device
    config = configs.config_of(device)
    tile = config.tile("dlogits", e.dtype, heavy=softcap_kind(problem) == 2)
    (bias, inner, outer), flags = logit_arguments(problem)
    e_operand, e_descriptor = configs.operand(e, tile.BM, tile.BK, config)
    c_operand, c_descriptor = configs.operand(c, tile.BN, tile.BK, config)
    panel_operand, panel_descriptor = configs.operand(panel, tile.BM, tile.BN, config)
    # With descriptors one program per multiprocessor walks over tiles: the loads of the next start under the epilogue.
    described = e_descriptor and c_descriptor and panel_descriptor
    most = configs.processors_of(device) if described else 1 << 31
    upstream = (gradients.nll, gradients.rest, gradients.smooth, gradients.entropy)
    tensors = (
        e_operand, c_operand, bias, problem.weight, panel_operand, needed,
        problem.targets, fold.rows, fold.count, fold.m, fold.s, fold.nll, fold.entropy, *upstream, unit,
    )  # fmt: skip
    scalars = (
        inner, outer, problem.scale / problem.temperature,
        e.stride(0), c.stride(0), panel.stride(0), *(0 if g is None else g.stride(0) for g in upstream),
    )  # fmt: skip
    constants = dict(
        BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=configs.GROUP,
        E_DESCRIPTOR=e_descriptor, C_DESCRIPTOR=c_descriptor, PANEL_DESCRIPTOR=panel_descriptor,
        EVEN_D=c.shape[1] % tile.BK == 0, PRECISION=configs.precision_of(e.dtype), FLATTEN=described, **flags,
        HAS_WEIGHT=problem.weight is not None, HAS_UNIT=unit is not None,
        HAS_NLL=gradients.nll is not None, HAS_REST=gradients.rest is not None,
        HAS_SMOOTH=gradients.smooth is not None, HAS_ENTROPY=gradients.entropy is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    row_blocks, compiled = triton.cdiv(live, tile.BM), None

    def write(v0, v1):
        nonlocal compiled
        tiles = row_blocks * triton.cdiv(v1 - v0, tile.BN)
        sizes = (live, c.shape[0], c.shape[1], v1 - v0, v0)
        compiled = launch(
            dlogits_kernel, min(tiles, most), device, *tensors, *sizes, *scalars, compiled=compiled, **constants
        )

    return write


def panel_unit(problem, gradients):
    """fp16 only: the power of two that brings the largest finite coefficient of a row to about 2^10, a 0-d tensor.

    fp16 has few exponents: an upstream of 1/N would end among its subnormals, a large one beyond its range. bf16 and
    fp32 need no unit.
    """
    if problem.e.dtype != torch.float16:
        return None
    valid, largest = problem.targets != problem.ignore_index, []
    for g in gradients:
        if g is not None:
            largest.append(torch.where(valid & g.isfinite(), g, 0.0).abs().amax())
    if gradients.smooth is not None and problem.weight is not None:
        largest.append(largest[0] * problem.weight.float().abs().amax())
    largest = torch.stack(largest).amax() * abs(problem.scale / problem.temperature)
    return torch.ldexp(torch.ones_like(largest), (10 - torch.frexp(largest).exponent).clamp(-100, 100))


def new_panel(e, live, width):
    return torch.empty((live, width), dtype=e.dtype, device=e.device)
