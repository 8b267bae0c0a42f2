"""The fold relative to a known offset (`fold_relative` in the folder above) by specialised warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..logits import above, transform
from ..merge import overflows
from ..splits import counted, is_dense, pair, walk
from .pipeline import (
    BN,
    EIGHTH_LAYOUT,
    QUARTER_LAYOUT,
    ROWS,
    TALL_REGISTERS,
    TALL_WARPS,
    WORKER_REGISTERS,
    WORKER_WARPS,
    load,
    multiply,
    multiply_tall,
    new_buffers,
    new_ring,
    store,
)


@gluon.jit
def load_tiles(WARPGROUPS: gl.constexpr, ring, e, c, place, GROUP: gl.constexpr):
    blocks, splits, narrow, N, V, D = place
    step = 0
    i0, end, stride = walk(blocks, splits, narrow)
    for i in range(i0, end, stride):
        i_m, i_s, first, last = pair(i, blocks, splits, narrow, V, BN, GROUP)
        for i_t in range(first, last):
            step = load(ring, e, c, i_m * WARPGROUPS * ROWS, i_t * BN, D, step, WARPGROUPS)


@gluon.jit
def fold_rows(
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, ring, buffers, inputs, results, place, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, SOFTCAP: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """s = sum_{v != y} 2^(z_v - k) and z_y for the rows of one warpgroup. With STORE the terms go to the panel."""
    PIECES: gl.constexpr = 4 if WARPGROUPS == 2 else 8
    WIDTH: gl.constexpr = BN // PIECES
    layout: gl.constexpr = QUARTER_LAYOUT if WARPGROUPS == 2 else EIGHTH_LAYOUT
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    bias, targets, offset, inner, outer = inputs
    target_logit, part_m, part_s, panel, overflow = results
    blocks, splits, narrow, N, V, D = place
    step = 0
    i0, end, stride = walk(blocks, splits, narrow)
    for i in range(i0, end, stride):
        i_m, i_s, first, last = pair(i, blocks, splits, narrow, V, BN, GROUP)
        i_m = (i_m * WARPGROUPS + WARPGROUP) * ROWS
        o_m = i_m + gl.arange(0, ROWS, rows)
        m_m = o_m < N
        k = gl.load(offset + o_m, mask=m_m, other=float("inf"))
        y = gl.load(targets + o_m, mask=m_m, other=-1).to(gl.int32)
        s = gl.zeros([ROWS], gl.float32, rows)
        py = gl.zeros([ROWS], gl.float32, rows)
        for i_t in range(first, last):
            i_v = i_t * BN
            masked = (i_v + BN > V).to(gl.int32) + gl.max(((y >= i_v) & (y < i_v + BN)).to(gl.int32))
            if WARPGROUPS == 2:
                dots, step = multiply(ring, D, step, WARPGROUP)
            else:
                dots, step = multiply_tall(ring, D, step, WARPGROUP)
            for q in gl.static_range(PIECES):
                o_v = i_v + q * WIDTH + gl.arange(0, WIDTH, columns)
                x, unit = transform(dots[q], bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)
                p = gl.exp2(above(x, unit, k))
                if STORE:
                    stored = p
                    if SOFTCAP > 0:
                        stored = p * (1.0 - x * x)
                    store(panel, i_m, i_v + q * WIDTH, buffers.index(WARPGROUP * 2 + q % 2), stored)
                if masked > 0:
                    hit = o_v[None, :] == y[:, None]
                    py += gl.sum(gl.where(hit, p, 0.0), 1)
                    p = gl.where(hit | (o_v >= V)[None, :], 0.0, p)
                s += gl.sum(p, 1)
        o_part = i_s.to(gl.int64) * N + o_m
        gl.store(part_m + o_part, k, mask=m_m)
        gl.store(part_s + o_part, s, mask=m_m)
        gl.store(target_logit + o_m, k + gl.log2(py), mask=m_m & (y >= first * BN) & (y < last * BN))
        gl.store(overflow + 0 * o_m, 1, mask=m_m & overflows(k, s))
    if STORE:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "V", "splits", "narrow", "most"])
def hopper_fold_kernel(
    e, c, panel, bias, targets, count, offset, target_logit, part_m, part_s, overflow,
    N, V, D, splits, narrow, most, inner, outer,
    BM: gl.constexpr, GROUP: gl.constexpr, DENSE: gl.constexpr, COUNTED: gl.constexpr,
    HAS_BIAS: gl.constexpr, SOFTCAP: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor walks over pairs of a row block and a split."""
    if not is_dense(count, N, DENSE):
        return
    WARPGROUPS: gl.constexpr = BM // ROWS
    blocks = gl.cdiv(N, BM)
    if COUNTED:
        blocks, splits, narrow = counted(count, N, splits, narrow, most, gl.num_programs(0), BM)
    ring = new_ring(e, c, WARPGROUPS)
    buffers = ring[0]
    if STORE:
        buffers = new_buffers(panel)
    else:
        panel = e
    inputs = (bias, targets, offset, inner, outer)
    results = (target_logit, part_m, part_s, panel, overflow)
    place = (blocks, splits, narrow, N, V, D)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (fold_rows, (0, WARPGROUPS, ring, buffers, inputs, results, place, GROUP, HAS_BIAS, SOFTCAP, STORE)),
                (fold_rows, (1, WARPGROUPS, ring, buffers, inputs, results, place, GROUP, HAS_BIAS, SOFTCAP, STORE)),
                (load_tiles, (WARPGROUPS, ring, e, c, place, GROUP)),
            ],
            WORKER_WARPS,
            WORKER_REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (fold_rows, (0, WARPGROUPS, ring, buffers, inputs, results, place, GROUP, HAS_BIAS, SOFTCAP, STORE)),
                (fold_rows, (1, WARPGROUPS, ring, buffers, inputs, results, place, GROUP, HAS_BIAS, SOFTCAP, STORE)),
                (fold_rows, (2, WARPGROUPS, ring, buffers, inputs, results, place, GROUP, HAS_BIAS, SOFTCAP, STORE)),
                (load_tiles, (WARPGROUPS, ring, e, c, place, GROUP)),
            ],
            TALL_WARPS,
            TALL_REGISTERS,
        )
