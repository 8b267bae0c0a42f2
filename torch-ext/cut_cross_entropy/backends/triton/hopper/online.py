"""The fold relative to a running max (`fold_online` in the folder above) by specialised warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..logits import transform
from ..online import online_update
from ..splits import is_dense, pair, walk
from .fold import load_tiles
from .pipeline import (
    BM,
    BN,
    COLUMN_LAYOUT,
    QUARTER,
    ROW_LAYOUT,
    ROWS,
    WORKER_REGISTERS,
    WORKER_WARPS,
    multiply,
    new_ring,
)


@gluon.jit
def fold_half(
    HALF: gl.constexpr, ring, inputs, results, place, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
    SOFTCAP: gl.constexpr, HAS_WEIGHT: gl.constexpr, WANT_SMOOTH: gl.constexpr, WANT_ENTROPY: gl.constexpr,
    WANT_ARGMAX: gl.constexpr,
):  # fmt: skip
    """The state of one half of the rows of each row block, over each split of the vocabulary."""
    bias, weight, targets, inner, outer = inputs
    target_logit, part_m, part_s, part_weighted, part_pz, part_argmax = results
    blocks, splits, narrow, N, V, D = place
    step = 0
    i0, end, stride = walk(blocks, splits, narrow)
    for i in range(i0, end, stride):
        i_m, i_s, first, last = pair(i, blocks, splits, narrow, V, BN, GROUP)
        o_m = i_m * BM + HALF * ROWS + gl.arange(0, ROWS, ROW_LAYOUT)
        m_m = o_m < N
        y = gl.load(targets + o_m, mask=m_m, other=-1).to(gl.int32)
        zero = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
        least = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
        state = (least, zero, zero, zero, zero, gl.zeros([ROWS], gl.int32, ROW_LAYOUT))
        for i_t in range(first, last):
            i_v = i_t * BN
            masked = (i_v + BN > V).to(gl.int32) + gl.max(((y >= i_v) & (y < i_v + BN)).to(gl.int32))
            dots, step = multiply(ring, D, step, HALF)
            for q in gl.static_range(4):
                o_v = i_v + q * QUARTER + gl.arange(0, QUARTER, COLUMN_LAYOUT)
                x, unit = transform(dots[q], bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)
                state = online_update(
                    state, x, unit, weight, o_v, V, y, masked, SOFTCAP,
                    HAS_WEIGHT, WANT_SMOOTH, WANT_ENTROPY, WANT_ARGMAX,
                )  # fmt: skip
        m, s, target, weighted, pz, argmax = state
        o_part = i_s.to(gl.int64) * N + o_m
        gl.store(part_m + o_part, m, mask=m_m)
        gl.store(part_s + o_part, s, mask=m_m)
        gl.store(target_logit + o_m, target, mask=m_m & (y >= first * BN) & (y < last * BN))
        if WANT_SMOOTH:
            gl.store(part_weighted + o_part, weighted, mask=m_m)
        if WANT_ENTROPY:
            gl.store(part_pz + o_part, pz, mask=m_m)
        if WANT_ARGMAX:
            gl.store(part_argmax + o_part, argmax, mask=m_m)


@gluon.jit(do_not_specialize=["N", "V", "splits", "narrow"])
def hopper_online_kernel(
    e, c, bias, weight, targets, count, target_logit, part_m, part_s, part_weighted, part_pz, part_argmax,
    N, V, D, splits, narrow, inner, outer,
    GROUP: gl.constexpr, DENSE: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, WANT_SMOOTH: gl.constexpr, WANT_ENTROPY: gl.constexpr, WANT_ARGMAX: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor walks over pairs of a row block and a split."""
    if not is_dense(count, N, DENSE):
        return
    ring = new_ring(e, c, 2)
    inputs = (bias, weight, targets, inner, outer)
    results = (target_logit, part_m, part_s, part_weighted, part_pz, part_argmax)
    place = (gl.cdiv(N, BM), splits, narrow, N, V, D)
    gl.warp_specialize(
        [
            (fold_half, (
                0, ring, inputs, results, place, GROUP,
                HAS_BIAS, SOFTCAP, HAS_WEIGHT, WANT_SMOOTH, WANT_ENTROPY, WANT_ARGMAX,
            )),
            (fold_half, (
                1, ring, inputs, results, place, GROUP,
                HAS_BIAS, SOFTCAP, HAS_WEIGHT, WANT_SMOOTH, WANT_ENTROPY, WANT_ARGMAX,
            )),
            (load_tiles, (2, ring, e, c, place, GROUP)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )  # fmt: skip
