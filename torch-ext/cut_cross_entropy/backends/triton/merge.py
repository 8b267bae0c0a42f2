"""The splits of the vocabulary combined in order, and with them what a row's results are."""

import triton
import triton.language as tl

from .math import LN2, log1p
from .splits import counted, is_dense

# Sums of exponentials beyond this are of an offset too far below the largest logit (55 nats): products of them with
# the row's coefficient could leave the range of fp32 and bf16.
OVERFLOW: tl.constexpr = tl.constexpr(2.0**80)


@triton.jit
def base_of(b_m):
    """The max as an offset that can be subtracted: 0 while every logit so far is -inf."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)


@triton.jit
def overflows(b_k, b_s):
    """Whether the offset of a row was no good: too far below the largest logit, or no number to subtract."""
    return (b_s > OVERFLOW) | (b_k == float("-inf"))


@triton.jit(do_not_specialize=["N", "V", "splits", "narrow", "splits_listed", "programs", "ignore_index"])
def merge_kernel(
    targets, part_m, part_s, part_weighted, part_pz, part_argmax, total_weight,
    nll,  # [N], comes as the target's logit
    lse, smooth, entropy, prediction, m, s,  # [N] each
    count, N, V, splits, narrow, splits_listed, programs, ignore_index,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
    LINEAR: tl.constexpr, DENSE: tl.constexpr, COUNTED: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    valid = tl.load(targets + o_n, mask=m_n, other=0).to(tl.int64) != ignore_index
    m_v = m_n & valid
    b_m = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_s = tl.zeros([BLOCK], dtype=tl.float32)
    b_weighted = tl.zeros([BLOCK], dtype=tl.float32)
    b_pz = tl.zeros([BLOCK], dtype=tl.float32)
    b_argmax = tl.zeros([BLOCK], dtype=tl.int32)
    o_part = o_n.to(tl.int64)
    if COUNTED:
        _, splits, _ = counted(count, N, splits, narrow, splits_listed, programs, BM)
    elif not is_dense(count, N, DENSE):
        splits = splits_listed
    for _ in range(0, splits):
        b_top = tl.load(part_m + o_part, mask=m_v, other=float("-inf"))
        b_add = tl.load(part_s + o_part, mask=m_v, other=0.0)
        b_new = tl.maximum(b_m, b_top)
        b_base = base_of(b_new)
        b_decay, b_gain = tl.exp2(b_m - b_base), tl.exp2(b_top - b_base)
        if WANT_SMOOTH and not LINEAR:
            b_weighted += tl.load(part_weighted + o_part, mask=m_v, other=0.0)
        if WANT_ENTROPY:
            b_more = tl.load(part_pz + o_part, mask=m_v, other=0.0)
            b_drop = tl.where(b_m == float("-inf"), 0.0, b_m - b_base)
            b_fall = tl.where(b_top == float("-inf"), 0.0, b_top - b_base)
            b_pz = b_decay * (b_pz + b_s * b_drop) + b_gain * (b_more + b_add * b_fall)
        if WANT_ARGMAX:
            b_at = tl.load(part_argmax + o_part, mask=m_v, other=0)
            b_argmax = tl.where(b_top > b_m, b_at, b_argmax)
        b_s = b_s * b_decay + b_add * b_gain
        b_m = b_new
        o_part += N
    if LINEAR:
        b_weighted = tl.load(part_weighted + o_n, mask=m_v, other=0.0)
    b_target = tl.load(nll + o_n, mask=m_v, other=0.0)
    b_ahead = b_m - b_target
    b_gain = tl.exp2(-b_ahead)
    b_nll = tl.where(b_ahead < 60.0, log1p(b_s * tl.exp2(b_ahead)), LN2 * (b_ahead + tl.log2(b_s + b_gain)))
    b_s += b_gain
    if WANT_ENTROPY:
        b_pz -= tl.where(b_gain > 0.0, b_gain * b_ahead, 0.0)
    b_lse = LN2 * (b_m + tl.log2(b_s))
    tl.store(nll + o_n, tl.where(valid, b_nll, 0.0), mask=m_n)
    tl.store(lse + o_n, tl.where(valid, b_lse, 0.0), mask=m_n)
    tl.store(m + o_n, tl.where(valid, b_m, float("inf")), mask=m_n)
    tl.store(s + o_n, tl.where(valid, b_s, 1.0), mask=m_n)
    if WANT_SMOOTH:
        total = V.to(tl.float32)
        if HAS_WEIGHT:
            total = tl.load(total_weight)
        tl.store(smooth + o_n, tl.where(valid, total * b_lse - LN2 * b_weighted, 0.0), mask=m_n)
    if WANT_ENTROPY:
        tl.store(entropy + o_n, tl.where(valid, LN2 * (tl.log2(b_s) - b_pz / b_s), 0.0), mask=m_n)
    if WANT_ARGMAX:
        tl.store(prediction + o_n, tl.where(valid, b_argmax, -1).to(tl.int64), mask=m_n)
