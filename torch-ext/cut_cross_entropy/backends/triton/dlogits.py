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

from . import configs, hopper
from .gradient import at_target, elsewhere, row_state
from .launch import cdiv, launch
from .logits import grouped, logit_arguments, softcap_kind, store_tile, tile_dot, transform


@triton.jit(do_not_specialize=["live", "V", "width", "i_v0", "s_nll", "s_rest", "s_smooth", "s_entropy"])
def dlogits_kernel(
    e, c, panel, bias, weight, needed,
    targets, rows, count, m, s, loss, entropy,  # row state
    g_nll, g_rest, g_smooth, g_entropy, unit,  # upstream gradients [N]
    live, V, D, width, i_v0, inner, outer, factor, s_nll, s_rest, s_smooth, s_entropy, stride_e, stride_c, stride_panel,
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

        row = row_state(
            o_m, (targets, rows, count, m, s, loss, entropy), (g_nll, g_rest, g_smooth, g_entropy, unit),
            (s_nll, s_rest, s_smooth, s_entropy), factor, HAS_UNIT, HAS_NLL, HAS_REST, HAS_SMOOTH, HAS_ENTROPY,
        )  # fmt: skip
        b_dz = elsewhere(b_x, unit_x, row, weight, o_v, V, SOFTCAP, HAS_WEIGHT, HAS_SMOOTH, HAS_ENTROPY)
        b_y = row[0]
        if tl.max(((b_y >= i_v) & (b_y < i_v + BN)).to(tl.int32)) == 1:
            b_dzy = at_target(row, weight, outer, SOFTCAP, HAS_WEIGHT, HAS_SMOOTH, HAS_ENTROPY)
            b_dz = tl.where(o_v[None, :] == b_y[:, None], b_dzy[:, None], b_dz)
        store_tile(panel, b_dz, i_m, i_t * BN, live, width, stride_panel, BM, BN, PANEL_DESCRIPTOR)


def dlogits(problem, e, fold, gradients, live, unit, panel, needed=None, tape=None):
    """Returns write(v0, v1): panel[:, : v1 - v0] = dz of the columns v0 to v1 for the `live` rows of a compacted e.

    Where the int32 [1] `needed` is 0 when that runs, nothing is written.
    """
    c, device = problem.c, e.device
    (bias, *scalars), flags = logit_arguments(problem)
    scalars.append(problem.scale / problem.temperature)
    upstream = (gradients.nll, gradients.rest, gradients.smooth, gradients.entropy)
    scalars += [0 if g is None else g.stride(0) for g in upstream]
    rows = (problem.targets, fold.rows, fold.count, fold.m, fold.s, fold.nll, fold.entropy, *upstream, unit)
    flags |= dict(
        HAS_WEIGHT=problem.weight is not None, HAS_UNIT=unit is not None,
        HAS_NLL=gradients.nll is not None, HAS_REST=gradients.rest is not None,
        HAS_SMOOTH=gradients.smooth is not None, HAS_ENTROPY=gradients.entropy is not None,
    )  # fmt: skip
    # With descriptors one program per multiprocessor walks over tiles: the loads of the next start under the epilogue.
    most = configs.processors_of(device)
    if configs.specialised(e, c, panel):
        kernel, tile, options = hopper.dlogits_kernel, hopper.TILE, dict(GROUP=configs.GROUP)
        operands = (*hopper.operands(e, c, panel), *hopper.present(fold.m, bias, problem.weight), needed)
        rows = hopper.present(fold.m, *rows)
    else:
        config = configs.config_of(device)
        kernel, tile = dlogits_kernel, config.tile("dlogits", e.dtype, heavy=softcap_kind(problem) == 2)
        e_operand, e_descriptor = configs.operand(e, tile.BM, tile.BK, config)
        c_operand, c_descriptor = configs.operand(c, tile.BN, tile.BK, config)
        panel_operand, panel_descriptor = configs.operand(panel, tile.BM, tile.BN, config)
        operands = (e_operand, c_operand, panel_operand, bias, problem.weight, needed)
        described = e_descriptor and c_descriptor and panel_descriptor
        most = most if described else 1 << 31
        scalars += e.stride(0), c.stride(0), panel.stride(0)
        options = dict(
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=configs.GROUP,
            E_DESCRIPTOR=e_descriptor, C_DESCRIPTOR=c_descriptor, PANEL_DESCRIPTOR=panel_descriptor,
            EVEN_D=c.shape[1] % tile.BK == 0, PRECISION=configs.precision_of(e.dtype), FLATTEN=described,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    row_blocks, compiled = cdiv(live, tile.BM), None

    def write(v0, v1):
        nonlocal compiled
        tiles = row_blocks * cdiv(v1 - v0, tile.BN)
        sizes = (live, c.shape[0], c.shape[1], v1 - v0, v0)
        compiled = launch(
            kernel, min(tiles, most), device, *operands, *rows, *sizes, *scalars,
            compiled=compiled, tape=tape, **options, **flags,
        )  # fmt: skip

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
