"""The panel of gradients with respect to the logits (`dlogits_kernel` in the folder above) by specialised warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..gradient import at_target, elsewhere, row_state
from ..logits import grouped, transform
from .pipeline import (
    BM,
    BN,
    COLUMN_LAYOUT,
    QUARTER,
    ROW_LAYOUT,
    ROWS,
    WORKER_REGISTERS,
    WORKER_WARPS,
    load,
    multiply,
    new_buffers,
    new_ring,
    store,
)


@gluon.jit
def load_tiles(ring, e, c, place, GROUP: gl.constexpr):
    blocks, columns, i_v0, V, D = place
    step = 0
    for i in range(gl.program_id(0), blocks * columns, gl.num_programs(0)):
        i_m, i_t = grouped(i, blocks, columns, GROUP)
        step = load(ring, e, c, i_m * BM, i_v0 + i_t * BN, D, step, 2)


@gluon.jit
def write_half(
    HALF: gl.constexpr, ring, panel, buffers, inputs, state, upstream, strides, place, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_UNIT: gl.constexpr,
    HAS_NLL: gl.constexpr, HAS_REST: gl.constexpr, HAS_SMOOTH: gl.constexpr, HAS_ENTROPY: gl.constexpr,
):  # fmt: skip
    """dz for one half of the rows of each tile."""
    bias, weight, inner, outer, factor = inputs
    blocks, columns, i_v0, V, D = place
    step = 0
    for i in range(gl.program_id(0), blocks * columns, gl.num_programs(0)):
        i_m, i_t = grouped(i, blocks, columns, GROUP)
        i_m = i_m * BM + HALF * ROWS
        i_v = i_v0 + i_t * BN
        o_m = i_m + gl.arange(0, ROWS, ROW_LAYOUT)
        row = row_state(o_m, state, upstream, strides, factor, HAS_UNIT, HAS_NLL, HAS_REST, HAS_SMOOTH, HAS_ENTROPY)
        # First used after the product, under which these loads have come in.
        dots, step = multiply(ring, D, step, HALF)
        dz_y = at_target(row, weight, outer, SOFTCAP, HAS_WEIGHT, HAS_SMOOTH, HAS_ENTROPY)
        y = row[0]
        hit = gl.max(((y >= i_v) & (y < i_v + BN)).to(gl.int32))
        for q in gl.static_range(4):
            o_v = i_v + q * QUARTER + gl.arange(0, QUARTER, COLUMN_LAYOUT)
            x, unit = transform(dots[q], bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)
            dz = elsewhere(x, unit, row, weight, o_v, V, SOFTCAP, HAS_WEIGHT, HAS_SMOOTH, HAS_ENTROPY)
            column, buffer = i_t * BN + q * QUARTER, buffers.index(HALF * 2 + q % 2)
            # A tile that left the branch would be copied register by register.
            if hit == 1:
                store(panel, i_m, column, buffer, gl.where(o_v[None, :] == y[:, None], dz_y[:, None], dz))
            else:
                store(panel, i_m, column, buffer, dz)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["live", "V", "width", "i_v0", "s_nll", "s_rest", "s_smooth", "s_entropy"])
def hopper_dlogits_kernel(
    e, c, panel, bias, weight, needed,
    targets, rows, count, m, s, loss, entropy,  # row state
    g_nll, g_rest, g_smooth, g_entropy, unit,  # upstream gradients [N]
    live, V, D, width, i_v0, inner, outer, factor, s_nll, s_rest, s_smooth, s_entropy,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_WEIGHT: gl.constexpr,
    HAS_UNIT: gl.constexpr, HAS_NLL: gl.constexpr, HAS_REST: gl.constexpr, HAS_SMOOTH: gl.constexpr,
    HAS_ENTROPY: gl.constexpr,
):  # fmt: skip
    if needed is not None:
        if gl.load(needed) == 0:
            return
    ring = new_ring(e, c, 2)
    buffers = new_buffers(panel)
    inputs = (bias, weight, inner, outer, factor)
    state = (targets, rows, count, m, s, loss, entropy)
    upstream = (g_nll, g_rest, g_smooth, g_entropy, unit)
    strides = (s_nll, s_rest, s_smooth, s_entropy)
    place = (gl.cdiv(live, BM), gl.cdiv(width, BN), i_v0, V, D)
    gl.warp_specialize(
        [
            (write_half, (
                0, ring, panel, buffers, inputs, state, upstream, strides, place, GROUP,
                HAS_BIAS, SOFTCAP, HAS_WEIGHT, HAS_UNIT, HAS_NLL, HAS_REST, HAS_SMOOTH, HAS_ENTROPY,
            )),
            (write_half, (
                1, ring, panel, buffers, inputs, state, upstream, strides, place, GROUP,
                HAS_BIAS, SOFTCAP, HAS_WEIGHT, HAS_UNIT, HAS_NLL, HAS_REST, HAS_SMOOTH, HAS_ENTROPY,
            )),
            (load_tiles, (ring, e, c, place, GROUP)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )  # fmt: skip
