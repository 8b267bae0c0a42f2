"""The running state of the fold: per row max m, sum of exponentials s relative to it, and what the options ask for.

    m' = max(m, max_v z_v)    s' = s * 2^(m - m') + sum_{v != y} 2^(z_v - m')
    pz' = the same sum of 2^(z_v - m') (z_v - m')    weighted' = weighted + sum_v w_v z_v

With z_y, the target's logit as it goes by, and the lowest column that attains m.
"""

import triton
import triton.language as tl

from .logits import above
from .merge import base_of


@triton.jit
def summed(
    b_x, unit, b_hit, b_m, b_argmax, o_v, MASKED: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr
):
    """Of one tile z = x * unit, by row: max, relative to the new m the sums of 2^z and 2^z z, the new argmax."""
    b_max = tl.max(b_x, 1)
    b_top = b_max * unit
    if WANT_ARGMAX:
        if tl.max((b_top > b_m).to(tl.int32)) == 1:
            b_at = tl.min(tl.where(b_x == b_max[:, None], o_v[None, :], 2147483647), 1)
            b_argmax = tl.where(b_top > b_m, b_at, b_argmax)
    b_above = above(b_x, unit, base_of(tl.maximum(b_m, b_top)))
    b_p = tl.exp2(b_above)
    if MASKED:
        b_p = tl.where(b_hit, 0.0, b_p)
    b_add_pz = b_top
    if WANT_ENTROPY:
        # Of a logit of -inf p is 0, and so is p * z here.
        b_add_pz = tl.sum(b_p * tl.maximum(b_above, -256.0), 1)
    return b_top, tl.sum(b_p, 1), b_add_pz, b_argmax


@triton.jit
def online_update(
    state, b_x, unit, weight, o_v, V, b_y, masked, SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
):  # fmt: skip
    """The state (m, s, z_y, weighted, pz, argmax) with the columns o_v of the logits x * unit taken in.

    `masked` is above 0 where a column may be a target's or past the end.
    """
    b_m, b_s, b_target, b_weighted, b_pz, b_argmax = state
    if SOFTCAP == 0:
        # With a unit above 0 the largest x is the largest logit.
        sign = tl.where(unit < 0.0, -1.0, 1.0)
        b_x, unit = b_x * sign, unit * sign
    if WANT_SMOOTH:
        b_wx = b_x
        if HAS_WEIGHT:
            b_wx = b_x * tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
        b_weighted += tl.sum(tl.where((o_v < V)[None, :], b_wx, 0.0), 1) * unit
    # Both branches hand on row vectors alone: a tile that left them would be copied register by register.
    if masked > 0:
        b_hit = o_v[None, :] == b_y[:, None]
        b_xy = tl.sum(tl.where(b_hit, b_x, 0.0), 1)
        b_real = tl.where((o_v < V)[None, :], b_x, float("-inf"))
        b_top, b_add, b_add_pz, b_argmax = summed(
            b_real, unit, b_hit, b_m, b_argmax, o_v, True, WANT_ENTROPY, WANT_ARGMAX
        )
    else:
        b_xy = tl.where(b_y == b_y, 0.0, 0.0)
        b_top, b_add, b_add_pz, b_argmax = summed(b_x, unit, b_x, b_m, b_argmax, o_v, False, WANT_ENTROPY, WANT_ARGMAX)
    b_target += b_xy * unit
    b_new = tl.maximum(b_m, b_top)
    b_base = base_of(b_new)
    b_decay = tl.exp2(b_m - b_base)
    if WANT_ENTROPY:
        b_drop = tl.where(b_m == float("-inf"), 0.0, b_m - b_base)
        b_pz = b_decay * (b_pz + b_s * b_drop) + b_add_pz
    return b_new, b_s * b_decay + b_add, b_target, b_weighted, b_pz, b_argmax
