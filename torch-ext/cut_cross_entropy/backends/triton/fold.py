"""The fold: one pass over the vocabulary that keeps, per row, the target's logit, the max over all classes and the sum
of exponentials over all other classes.

Exponentials are base 2, and logits in units of log2(e). For each tile of logits, still in registers, with the target's
column taken out where it goes by:

    m' = max(m, max_v z_v)      s' = s * 2^(m - m') + sum_{v != y} 2^(z_v - m')

and at the end

    loss = log(1 + s) where the target's logit is the max, else (m - z_y) + log(s + 2^(z_y - m))

which keeps the loss of a confident token, and with it its gradient, to full relative precision, and is never negative.

A program owns one block of rows and one split of the vocabulary; `merge_kernel` combines the splits in order. Reads
e once per split and c once per row block (from L2 where GROUP row blocks run side by side); writes 8 bytes per row and
split. The options add per row: sum w z (label smoothing), sum 2^(z - m)(z - m) (entropy), argmax.
"""

import torch
import triton
import triton.language as tl

from ...planner import forward_splits
from ...problem import Fold
from . import configs
from .launch import launch
from .logits import grouped, logit_arguments, store_tile, tile_dot, transform
from .math import LN2, log1p, tanh

# Sums of exponentials beyond this are of an offset too far below the largest logit (55 nats): products of them with
# the row's coefficient could leave the range of fp32 and bf16.
OVERFLOW: tl.constexpr = tl.constexpr(2.0**80)


@triton.jit
def base_of(b_m):
    """The max as an offset that can be subtracted: 0 while every logit so far is -inf."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)


@triton.jit
def is_dense(count, N, DENSE: tl.constexpr):
    """At least DENSE / 8 of the rows are valid: then the fold runs over all of them."""
    return tl.load(count).to(tl.int64) * 8 >= N.to(tl.int64) * DENSE


@triton.jit
def summed(b_z, b_hit, b_m, MASKED: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr):
    """Of one tile, by row: max, and relative to the new running max the sums of 2^z and 2^z z; the max's column."""
    if WANT_ARGMAX:
        b_top, b_at = tl.max(b_z, 1, return_indices=True, return_indices_tie_break_left=True)
    else:
        b_top = tl.max(b_z, 1)
        b_at = tl.zeros(b_top.shape, dtype=tl.int32)
    b_above = b_z - base_of(tl.maximum(b_m, b_top))[:, None]
    b_p = tl.exp2(b_above)
    if MASKED:
        b_p = tl.where(b_hit, 0.0, b_p)
    b_lean = tl.zeros(b_top.shape, dtype=tl.float32)
    if WANT_ENTROPY:
        b_lean = tl.sum(tl.where(b_p > 0.0, b_p * b_above, b_p), 1)
    return b_top, tl.sum(b_p, 1), b_lean, b_at


@triton.jit
def overflows(b_k, b_s):
    """Whether the offset of a row was no good: too far below the largest logit, or no number to subtract."""
    return (b_s > OVERFLOW) | (b_k == float("-inf"))


@triton.jit(do_not_specialize=["V", "ignore_index"])
def offset_kernel(
    e, c, bias, targets, offset, overflow, V, D, inner, outer, stride_e, stride_c, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """offset = the target's logit, as a product of vectors; +inf, relative to which nothing counts, where ignored."""
    i_n = tl.program_id(0)
    if overflow is not None:
        tl.store(overflow, 0, mask=i_n == 0)
    y = tl.load(targets + i_n).to(tl.int64)
    valid = (y != ignore_index) & (y >= 0) & (y < V)
    y = tl.where(valid, y, 0)
    b_dot = tl.zeros([BLOCK], dtype=tl.float32)
    for i_d in range(0, D, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        b_e = tl.load(e + i_n.to(tl.int64) * stride_e + o_d, mask=(o_d < D) & valid, other=0.0)
        b_c = tl.load(c + y * stride_c + o_d, mask=(o_d < D) & valid, other=0.0)
        b_dot += b_e.to(tl.float32) * b_c.to(tl.float32)
    z = tl.sum(b_dot, 0)
    if HAS_BIAS:
        z += tl.load(bias + y).to(tl.float32)
    z *= inner
    if HAS_SOFTCAP:
        z = outer * tanh(z)
    tl.store(offset + i_n, tl.where(valid, z, float("inf")))


@triton.jit
def fold_relative(
    e, c, bias, panel, b_k, b_y, i_m, o_m, first, last, N, V, D, inner, outer, stride_e, stride_c, stride_panel,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    STORE: tl.constexpr, PANEL_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Relative to a known offset k: s = sum_{v != y} 2^(z_v - k), and z_y. With STORE the terms go to the panel."""
    b_s = tl.zeros([BM], dtype=tl.float32)
    b_xy = tl.zeros([BM], dtype=tl.float32)
    for i_t in tl.range(first, last, flatten=FLATTEN):
        i_v = i_t * BN
        o_v = i_v + tl.arange(0, BN)
        b_z = tile_dot(
            e, c, i_m, o_m, i_v, V, D, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION,
        )  # fmt: skip
        b_z = transform(b_z, bias, o_v, V, inner, outer, HAS_BIAS, HAS_SOFTCAP)
        b_x = tl.exp2(b_z - b_k[:, None])
        if STORE:
            b_stored = b_x
            if HAS_SOFTCAP:
                b_stored = b_x * (1.0 - (b_z / outer) * (b_z / outer))
            store_tile(panel, b_stored, i_m, i_v, N, V, stride_panel, BM, BN, PANEL_DESCRIPTOR)
        # Both branches hand on row vectors alone: a tile that left them would be copied register by register.
        b_masked = (i_v + BN > V).to(tl.int32) + tl.max(((b_y >= i_v) & (b_y < i_v + BN)).to(tl.int32))
        if b_masked > 0:
            b_hit = o_v[None, :] == b_y[:, None]
            b_here = tl.sum(tl.where(b_hit, b_x, 0.0), 1)
            b_add = tl.sum(tl.where(b_hit | (o_v >= V)[None, :], 0.0, b_x), 1)
        else:
            b_here = tl.zeros([BM], dtype=tl.float32)
            b_add = tl.sum(b_x, 1)
        b_xy += b_here
        b_s += b_add
    return b_s, b_k + tl.log2(b_xy)


@triton.jit
def fold_online(
    e, c, bias, weight, b_y, i_m, o_m, first, last, V, D, inner, outer, stride_e, stride_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
):  # fmt: skip
    """Relative to a running max m: m, s, z_y, and what the options ask for."""
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_s = tl.zeros([BM], dtype=tl.float32)
    b_target = tl.zeros([BM], dtype=tl.float32)
    b_weighted = tl.zeros([BM], dtype=tl.float32)
    b_tilt = tl.zeros([BM], dtype=tl.float32)
    b_argmax = tl.zeros([BM], dtype=tl.int32)
    for i_t in tl.range(first, last, flatten=FLATTEN):
        i_v = i_t * BN
        o_v = i_v + tl.arange(0, BN)
        b_z = tile_dot(
            e, c, i_m, o_m, i_v, V, D, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION,
        )  # fmt: skip
        b_z = transform(b_z, bias, o_v, V, inner, outer, HAS_BIAS, HAS_SOFTCAP)
        if WANT_SMOOTH:
            b_wz = b_z
            if HAS_WEIGHT:
                b_wz = b_z * tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
            b_weighted += tl.sum(tl.where((o_v < V)[None, :], b_wz, 0.0), 1)
        b_masked = (i_v + BN > V).to(tl.int32) + tl.max(((b_y >= i_v) & (b_y < i_v + BN)).to(tl.int32))
        if b_masked > 0:
            b_hit = o_v[None, :] == b_y[:, None]
            b_zy = tl.sum(tl.where(b_hit, b_z, 0.0), 1)
            b_real = tl.where((o_v < V)[None, :], b_z, float("-inf"))
            b_top, b_add, b_lean, b_at = summed(b_real, b_hit, b_m, True, WANT_ENTROPY, WANT_ARGMAX)
        else:
            b_zy = tl.zeros([BM], dtype=tl.float32)
            b_top, b_add, b_lean, b_at = summed(b_z, b_z, b_m, False, WANT_ENTROPY, WANT_ARGMAX)
        b_target += b_zy
        if WANT_ARGMAX:
            b_argmax = tl.where(b_top > b_m, i_v + b_at, b_argmax)
        b_new = tl.maximum(b_m, b_top)
        b_base = base_of(b_new)
        b_decay = tl.exp2(b_m - b_base)
        if WANT_ENTROPY:
            b_drop = tl.where(b_m == float("-inf"), 0.0, b_m - b_base)
            b_tilt = b_decay * (b_tilt + b_s * b_drop) + b_lean
        b_s = b_s * b_decay + b_add
        b_m = b_new
    return b_m, b_s, b_target, b_weighted, b_tilt, b_argmax


@triton.jit(do_not_specialize=["N", "V", "splits"])
def fold_kernel(
    e, c, bias, weight, targets, rows, count,  # inputs
    offset,  # [N], with RELATIVE
    target_logit,  # [N]
    part_m, part_s, part_weighted, part_tilt, part_argmax,  # [splits, N] each
    panel, overflow,  # with STORE: a descriptor of [N, V], int32 [1]
    N, V, D, splits, inner, outer,
    stride_e, stride_c, stride_panel,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DENSE: tl.constexpr,
    LISTED: tl.constexpr, COUNTED: tl.constexpr, E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr, FLATTEN: tl.constexpr, RELATIVE: tl.constexpr, RETRY: tl.constexpr,
    STORE: tl.constexpr, PANEL_DESCRIPTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
):  # fmt: skip
    i_m, i_s = grouped(tl.program_id(0), tl.cdiv(N, BM), splits, GROUP)
    i_m = i_m * BM
    # Of the two launches, over all rows and over the list of valid ones, one does the work.
    if is_dense(count, N, DENSE) == LISTED:
        return
    o_m = i_m + tl.arange(0, BM)
    live = tl.load(count)
    if LISTED or COUNTED:
        if i_m >= live:
            return
    if LISTED:
        m_m = o_m < live
        o_m = tl.load(rows + o_m, mask=m_m, other=0)
    else:
        m_m = o_m < N
        o_m = tl.minimum(o_m, N - 1)
    b_y = tl.load(targets + o_m, mask=m_m, other=-1).to(tl.int64)
    o_m = o_m.to(tl.int64)

    tiles = tl.cdiv(V, BN)
    first = (tiles.to(tl.int64) * i_s // splits).to(tl.int32)
    last = (tiles.to(tl.int64) * (i_s + 1) // splits).to(tl.int32)
    o_part = i_s.to(tl.int64) * N + o_m
    m_target = m_m & (b_y >= first * BN) & (b_y < last * BN)
    if RELATIVE:
        b_m = tl.load(offset + o_m, mask=m_m, other=float("inf"))
        b_s, b_target = fold_relative(
            e, c, bias, panel, b_m, b_y, i_m, o_m, first, last, N, V, D, inner, outer, stride_e, stride_c, stride_panel,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION, FLATTEN, HAS_BIAS, HAS_SOFTCAP,
            STORE, PANEL_DESCRIPTOR,
        )  # fmt: skip
        if STORE:
            b_over = overflows(b_m, b_s)
            tl.store(overflow + 0 * o_m, 1, mask=m_m & b_over)
    else:
        if RETRY:
            b_m = tl.load(part_m + o_part, mask=m_m, other=0.0)
            b_s = tl.load(part_s + o_part, mask=m_m, other=0.0)
            if tl.max(overflows(b_m, b_s).to(tl.int32)) == 0:
                return
        b_m, b_s, b_target, b_weighted, b_tilt, b_argmax = fold_online(
            e, c, bias, weight, b_y, i_m, o_m, first, last, V, D, inner, outer, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION, FLATTEN, HAS_BIAS, HAS_SOFTCAP,
            HAS_WEIGHT, WANT_SMOOTH, WANT_ENTROPY, WANT_ARGMAX,
        )  # fmt: skip
        if WANT_SMOOTH:
            tl.store(part_weighted + o_part, b_weighted, mask=m_m)
        if WANT_ENTROPY:
            tl.store(part_tilt + o_part, b_tilt, mask=m_m)
        if WANT_ARGMAX:
            tl.store(part_argmax + o_part, b_argmax, mask=m_m)
    tl.store(part_m + o_part, b_m, mask=m_m)
    tl.store(part_s + o_part, b_s, mask=m_m)
    tl.store(target_logit + o_m, b_target, mask=m_target)


@triton.jit(do_not_specialize=["N", "V", "splits", "splits_listed", "ignore_index"])
def merge_kernel(
    targets, part_m, part_s, part_weighted, part_tilt, part_argmax, total_weight,
    nll,  # [N], comes as the target's logit
    lse, smooth, entropy, prediction, m, s,  # [N] each
    count, N, V, splits, splits_listed, ignore_index,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    valid = tl.load(targets + o_n, mask=m_n, other=0).to(tl.int64) != ignore_index
    m_v = m_n & valid
    b_m = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_s = tl.zeros([BLOCK], dtype=tl.float32)
    b_weighted = tl.zeros([BLOCK], dtype=tl.float32)
    b_tilt = tl.zeros([BLOCK], dtype=tl.float32)
    b_argmax = tl.zeros([BLOCK], dtype=tl.int32)
    o_part = o_n.to(tl.int64)
    if not is_dense(count, N, DENSE):
        splits = splits_listed
    for _ in range(0, splits):
        b_top = tl.load(part_m + o_part, mask=m_v, other=float("-inf"))
        b_add = tl.load(part_s + o_part, mask=m_v, other=0.0)
        b_new = tl.maximum(b_m, b_top)
        b_base = base_of(b_new)
        b_decay, b_gain = tl.exp2(b_m - b_base), tl.exp2(b_top - b_base)
        if WANT_SMOOTH:
            b_weighted += tl.load(part_weighted + o_part, mask=m_v, other=0.0)
        if WANT_ENTROPY:
            b_more = tl.load(part_tilt + o_part, mask=m_v, other=0.0)
            b_drop = tl.where(b_m == float("-inf"), 0.0, b_m - b_base)
            b_fall = tl.where(b_top == float("-inf"), 0.0, b_top - b_base)
            b_tilt = b_decay * (b_tilt + b_s * b_drop) + b_gain * (b_more + b_add * b_fall)
        if WANT_ARGMAX:
            b_at = tl.load(part_argmax + o_part, mask=m_v, other=0)
            b_argmax = tl.where(b_top > b_m, b_at, b_argmax)
        b_s = b_s * b_decay + b_add * b_gain
        b_m = b_new
        o_part += N
    b_target = tl.load(nll + o_n, mask=m_v, other=0.0)
    b_ahead = b_m - b_target
    b_gain = tl.exp2(-b_ahead)
    b_nll = tl.where(b_ahead < 60.0, log1p(b_s * tl.exp2(b_ahead)), LN2 * (b_ahead + tl.log2(b_s + b_gain)))
    b_s += b_gain
    if WANT_ENTROPY:
        b_tilt -= tl.where(b_gain > 0.0, b_gain * b_ahead, 0.0)
    b_lse = LN2 * (b_m + tl.log2(b_s))
    tl.store(nll + o_n, tl.where(valid, b_nll, 0.0), mask=m_n)
    tl.store(lse + o_n, tl.where(valid, b_lse, 0.0), mask=m_n)
    tl.store(m + o_n, tl.where(valid, b_m, 0.0), mask=m_n)
    tl.store(s + o_n, tl.where(valid, b_s, 1.0), mask=m_n)
    if WANT_SMOOTH:
        total = V.to(tl.float32)
        if HAS_WEIGHT:
            total = tl.load(total_weight)
        tl.store(smooth + o_n, tl.where(valid, total * b_lse - LN2 * b_weighted, 0.0), mask=m_n)
    if WANT_ENTROPY:
        tl.store(entropy + o_n, tl.where(valid, LN2 * (tl.log2(b_s) - b_tilt / b_s), 0.0), mask=m_n)
    if WANT_ARGMAX:
        tl.store(prediction + o_n, tl.where(valid, b_argmax, -1).to(tl.int64), mask=m_n)


def fold(problem, rows, count, want_smooth, want_entropy, want_prediction, panel=None, overflow=None, counted=False):
    """Fold the logits of all rows, or of the `count` rows listed.

    With a `panel` [N, >= V], of every row, or with `counted` of the first `count`: panel[i, v] = 2^(z_v - m), and the int32 [1] `overflow` becomes 1 where that
    would leave its range; the panel is then not to be used, while everything returned is right.
    """
    e, c = problem.e, problem.c
    (n, d), v, device = e.shape, c.shape[0], e.device
    config = configs.config_of(device)
    aligned, store = configs.describable(e) and configs.describable(c), panel is not None
    heavy = want_smooth or store and problem.softcap is not None
    tile = config.tile("dlogits" if store else "fold", e.dtype, heavy, aligned)
    row_blocks, processors = triton.cdiv(n, tile.BM), configs.processors_of(device)
    splits = forward_splits(n, v, d, block_m=tile.BM, block_n=tile.BN, processors=processors)

    def new(*shape, wanted=True, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    nll, lse, m, s = (new(n) for _ in range(4))
    smooth, entropy = new(n, wanted=want_smooth), new(n, wanted=want_entropy)
    prediction = new(n, wanted=want_prediction, dtype=torch.int64)
    if n == 0:
        return Fold(nll, lse, smooth, entropy, prediction, m, s, rows, count)
    most = max(splits)
    part_m, part_s = new(2, most, n).unbind()
    part_weighted, part_tilt = new(most, n, wanted=want_smooth), new(most, n, wanted=want_entropy)
    part_argmax = new(most, n, wanted=want_prediction, dtype=torch.int32)
    weighted = want_smooth and problem.weight is not None
    wants = dict(HAS_WEIGHT=weighted, WANT_SMOOTH=want_smooth, WANT_ENTROPY=want_entropy, WANT_ARGMAX=want_prediction)
    scalars, flags = logit_arguments(problem)
    bias, *scalars = scalars
    once = store or configs.is_small(n, v, d, device)
    # An offset known beforehand saves the running max, where that is worth the launches.
    relative = store or not (want_smooth or want_entropy or want_prediction or once)
    if relative:
        # Lives in m, which only the merge writes.
        launch(
            offset_kernel, n, device, e, c, bias, problem.targets, m, overflow, v, d, *scalars,
            e.stride(0), c.stride(0), problem.ignore_index, **flags, BLOCK=1024,
        )  # fmt: skip
    c_operand, c_descriptor = configs.operand(c, tile.BN, tile.BK, config)
    e_operand, e_descriptor = configs.operand(e, tile.BM, tile.BK, config)
    panel_operand, panel_descriptor = configs.operand(panel, tile.BM, tile.BN, config) if store else (None, False)
    dense = 0 if once else configs.DENSE

    def run(listed=False, relative=False, retry=False):
        described = e_descriptor and not listed
        launch(
            fold_kernel, row_blocks * splits[listed], device,
            e_operand if described else e, c_operand, bias, problem.weight, problem.targets, rows, count,
            m if relative else None, nll, part_m, part_s, part_weighted, part_tilt, part_argmax,
            panel_operand if relative else None, overflow if relative else None,
            n, v, d, splits[listed], *scalars, e.stride(0), c.stride(0), panel.stride(0) if store else 0,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=configs.fold_group(row_blocks, processors),
            DENSE=dense, LISTED=listed, COUNTED=counted,
            E_DESCRIPTOR=described, C_DESCRIPTOR=c_descriptor, EVEN_D=d % tile.BK == 0,
            PRECISION=configs.precision_of(e.dtype), FLATTEN=described and c_descriptor,
            RELATIVE=relative, RETRY=retry, STORE=store and relative, PANEL_DESCRIPTOR=panel_descriptor and relative,
            **flags, **wants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    run(relative=relative)
    if relative:
        run(retry=True)
    if not once:
        run(listed=True)
    launch(
        merge_kernel, triton.cdiv(n, 128), device,
        problem.targets, part_m, part_s, part_weighted, part_tilt, part_argmax,
        problem.weight.float().sum() if weighted else None,
        nll, lse, smooth, entropy, prediction, m, s, count, n, v, *splits, problem.ignore_index, **wants,
        DENSE=dense, BLOCK=128,
    )  # fmt: skip
    return Fold(nll, lse, smooth, entropy, prediction, m, s, rows, count)
