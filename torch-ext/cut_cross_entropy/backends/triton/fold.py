"""The fold: one pass over the vocabulary that keeps, per row, the target's logit and the sum of exponentials over all
other classes, relative to an offset m.

Exponentials are base 2, and logits in units of log2(e). For each tile of logits, still in registers, with the target's
column taken out where it goes by, either of

    relative    s += sum_{v != y} 2^(z_v - m)                            m is the target's logit, known beforehand
    online      m' = max(m, max_v z_v)    s' = s * 2^(m - m') + sum_{v != y} 2^(z_v - m')

and at the end

    loss = log(1 + s * 2^(m - z_y))    or, where m is far above z_y,    (m - z_y) + log(s + 2^(z_y - m))

which keeps the loss of a confident token, and with it its gradient, to full relative precision, and is never negative.
Online is for options that need the max, for passes so small that knowing the target's logit is not worth a launch, and
for the rare rows whose target lies so far below the max that `relative` leaves its range: they are folded again.

A program owns one block of rows and one split of the vocabulary; `merge_kernel` combines the splits in order. Reads
e once per split and c once per row block (from L2 where GROUP row blocks run side by side); writes 8 bytes per row and
split, and the exponentials themselves where there is a panel to hold them. The options add per row: sum w z (label
smoothing under a softcap), sum 2^(z - m)(z - m) (entropy), argmax.
"""

import torch
import triton
import triton.language as tl

from ...problem import Fold
from ...splits import forward_splits
from . import configs, hopper
from .launch import cdiv, launch
from .logits import above, logit_arguments, softcap_kind, store_tile, tile_dot, transform
from .merge import merge_kernel, overflows
from .offsets import offsets
from .online import online_update
from .splits import ROOM, counted, is_dense, pair


@triton.jit
def fold_relative(
    e, c, bias, panel, b_k, b_y, i_m, o_m, first, last, N, V, D, columns, inner, outer,
    stride_e, stride_c, stride_panel,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    STORE: tl.constexpr, PANEL_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Relative to a known offset k: s = sum_{v != y} 2^(z_v - k), and z_y. With STORE the terms go to the panel."""
    b_s = tl.zeros([BM], dtype=tl.float32)
    b_py = tl.zeros([BM], dtype=tl.float32)
    for i_t in tl.range(first, last, flatten=FLATTEN):
        i_v = i_t * BN
        o_v = i_v + tl.arange(0, BN)
        b_dot = tile_dot(
            e, c, i_m, o_m, i_v, V, D, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION,
        )  # fmt: skip
        b_x, unit = transform(b_dot, bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)
        b_p = tl.exp2(above(b_x, unit, b_k))
        if STORE:
            b_stored = b_p
            if SOFTCAP > 0:
                b_stored = b_p * (1.0 - b_x * b_x)
            store_tile(panel, b_stored, i_m, i_v, N, columns, stride_panel, BM, BN, PANEL_DESCRIPTOR)
        # Both branches hand on row vectors alone: a tile that left them would be copied register by register.
        b_masked = (i_v + BN > V).to(tl.int32) + tl.max(((b_y >= i_v) & (b_y < i_v + BN)).to(tl.int32))
        if b_masked > 0:
            b_hit = o_v[None, :] == b_y[:, None]
            b_here = tl.sum(tl.where(b_hit, b_p, 0.0), 1)
            b_add = tl.sum(tl.where(b_hit, 0.0, tl.where((o_v < V)[None, :], b_p, 0.0)), 1)
        else:
            b_here = tl.zeros([BM], dtype=tl.float32)
            b_add = tl.sum(b_p, 1)
        b_py += b_here
        b_s += b_add
    return b_s, b_k + tl.log2(b_py)


@triton.jit
def fold_online(
    e, c, bias, weight, b_y, i_m, o_m, first, last, V, D, inner, outer, stride_e, stride_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
):  # fmt: skip
    """Relative to a running max m: the state of `online_update`, over one split."""
    b_zero = tl.zeros([BM], dtype=tl.float32)
    b_least = tl.full([BM], float("-inf"), dtype=tl.float32)
    state = (b_least, b_zero, b_zero, b_zero, b_zero, tl.zeros([BM], dtype=tl.int32))
    for i_t in tl.range(first, last, flatten=FLATTEN):
        i_v = i_t * BN
        o_v = i_v + tl.arange(0, BN)
        b_dot = tile_dot(
            e, c, i_m, o_m, i_v, V, D, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION,
        )  # fmt: skip
        b_x, unit = transform(b_dot, bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)
        masked = (i_v + BN > V).to(tl.int32) + tl.max(((b_y >= i_v) & (b_y < i_v + BN)).to(tl.int32))
        state = online_update(
            state, b_x, unit, weight, o_v, V, b_y, masked, SOFTCAP, HAS_WEIGHT, WANT_SMOOTH, WANT_ENTROPY, WANT_ARGMAX
        )
    return state


@triton.jit(do_not_specialize=["N", "V", "splits", "narrow", "most", "programs", "columns"])
def fold_kernel(
    e, c, bias, weight, targets, rows, count,  # inputs
    offset,  # [N], with RELATIVE
    target_logit,  # [N]
    part_m, part_s, part_weighted, part_pz, part_argmax,  # [splits, N] each
    panel,  # with STORE: a descriptor of [N, V]
    overflow,  # int32 [1]: whether a row is to be folded again
    N, V, D, splits, narrow, most, programs, columns, inner, outer,
    stride_e, stride_c, stride_panel,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, DENSE: tl.constexpr,
    LISTED: tl.constexpr, COUNTED: tl.constexpr, E_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    RELATIVE: tl.constexpr, RETRY: tl.constexpr, STORE: tl.constexpr, PANEL_DESCRIPTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ARGMAX: tl.constexpr,
):  # fmt: skip
    # Of the two launches, over all rows and over the list of valid ones, one does the work.
    if is_dense(count, N, DENSE) == LISTED:
        return
    if RETRY:
        if tl.load(overflow) == 0:
            return
    live, blocks = tl.minimum(tl.load(count), N), tl.cdiv(N, BM)
    if COUNTED:
        blocks, splits, narrow = counted(count, N, splits, narrow, most, programs, BM)
        if tl.program_id(0) >= blocks * splits:
            return
    i_m, i_s, first, last = pair(tl.program_id(0), blocks, splits, narrow, V, SPAN, GROUP)
    i_m = i_m * BM
    o_m = i_m + tl.arange(0, BM)
    if LISTED:
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

    first, last = first * (SPAN // BN), tl.minimum(last * (SPAN // BN), tl.cdiv(V, BN))
    o_part = i_s.to(tl.int64) * N + o_m
    m_target = m_m & (b_y >= first * BN) & (b_y < last * BN)
    if RELATIVE:
        b_m = tl.load(offset + o_m, mask=m_m, other=float("inf"))
        b_s, b_target = fold_relative(
            e, c, bias, panel, b_m, b_y, i_m, o_m, first, last, N, V, D, columns, inner, outer,
            stride_e, stride_c, stride_panel,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION, FLATTEN, HAS_BIAS, SOFTCAP,
            STORE, PANEL_DESCRIPTOR,
        )  # fmt: skip
        tl.store(overflow + 0 * o_m, 1, mask=m_m & overflows(b_m, b_s))
    else:
        if RETRY:
            b_m = tl.load(part_m + o_part, mask=m_m, other=0.0)
            b_s = tl.load(part_s + o_part, mask=m_m, other=0.0)
            if tl.max(overflows(b_m, b_s).to(tl.int32)) == 0:
                return
        b_m, b_s, b_target, b_weighted, b_pz, b_argmax = fold_online(
            e, c, bias, weight, b_y, i_m, o_m, first, last, V, D, inner, outer, stride_e, stride_c,
            BM, BN, BK, E_DESCRIPTOR, C_DESCRIPTOR, EVEN_D, PRECISION, FLATTEN, HAS_BIAS, SOFTCAP,
            HAS_WEIGHT, WANT_SMOOTH, WANT_ENTROPY, WANT_ARGMAX,
        )  # fmt: skip
        if WANT_SMOOTH:
            tl.store(part_weighted + o_part, b_weighted, mask=m_m)
        if WANT_ENTROPY:
            tl.store(part_pz + o_part, b_pz, mask=m_m)
        if WANT_ARGMAX:
            tl.store(part_argmax + o_part, b_argmax, mask=m_m)
    tl.store(part_m + o_part, b_m, mask=m_m)
    tl.store(part_s + o_part, b_s, mask=m_m)
    tl.store(target_logit + o_m, b_target, mask=m_target)


def fold(problem, rows, count, want_smooth, want_entropy, want_prediction, panel=None, tape=None):
    """Fold the logits of the `count` rows listed, or where `rows` is None of the first `count`.

    With a `panel` of the first classes panel[i, v] = 2^(z_v - m), where `folds_all_rows`. It is not to be used where
    `overflow` is 1 afterwards; everything else that is returned is right then too.
    """
    e, c = problem.e, problem.c
    (n, d), v, device = e.shape, c.shape[0], e.device
    config = configs.config_of(device)
    aligned, store = configs.describable(e) and configs.describable(c), panel is not None
    by_count = rows is None
    once = by_count or configs.is_small(n, v, d, device)
    # Without a softcap the sum of all logits is one product of vectors per row.
    linear = want_smooth and not once and problem.softcap is None
    online = want_entropy or want_prediction or want_smooth and not linear
    # An offset known beforehand saves the running max, where that is worth the launches.
    relative = store or not (online or once)
    heavy = softcap_kind(problem) == 2 or want_smooth and not linear
    heavy = heavy or not aligned and (online or problem.softcap is not None)
    tile = config.tile("dlogits" if store else "fold", e.dtype, heavy, aligned)
    specialised = configs.specialised(e, c, c if panel is None else panel)
    # The columns of a bias would not fit into the registers of a tall tile.
    plain = relative and not store and problem.bias is None
    # Of the pass over all rows. Rows that are folded again have to be by its splits, multiples of its columns.
    dense_tile = hopper.fold_tile(n, plain) if specialised else tile
    row_blocks, processors = cdiv(n, tile.BM), configs.processors_of(device)
    splits = forward_splits(n, v, d, block_m=dense_tile.BM, block_n=dense_tile.BN, processors=processors)

    def new(*shape, wanted=True, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    nll, lse, s = (new(n) for _ in range(3))
    m = new(n) if problem.offset is None else problem.offset
    smooth, entropy = new(n, wanted=want_smooth), new(n, wanted=want_entropy)
    prediction = new(n, wanted=want_prediction, dtype=torch.int64)
    if n == 0:
        return Fold(nll, lse, smooth, entropy, prediction, m, s, rows, count, panel)
    overflow = torch.zeros(1, dtype=torch.int32, device=device) if relative else None
    most = splits.listed
    part_m, part_s = new(2, most, n).unbind()
    part_weighted = new(1 if linear else most, n, wanted=want_smooth)
    part_pz = new(most, n, wanted=want_entropy)
    part_argmax = new(most, n, wanted=want_prediction, dtype=torch.int32)
    weighted = want_smooth and problem.weight is not None
    wants = dict(
        HAS_WEIGHT=weighted and online, WANT_SMOOTH=want_smooth and online,
        WANT_ENTROPY=want_entropy, WANT_ARGMAX=want_prediction,
    )  # fmt: skip
    (bias, *scalars), flags = logit_arguments(problem)
    if problem.offset is None and (relative or linear):
        # The offset lives in m, which only the merge writes.
        offsets(problem, m, part_weighted if linear else None)
    dense = 0 if once else configs.DENSE
    # At work side by side: one a multiprocessor.
    programs = min(cdiv(n, dense_tile.BM) * splits.every, processors)

    def run_specialised():
        if relative:
            launch(
                hopper.fold_kernel, programs, device, *hopper.operands(e, c, panel),
                *hopper.present(m, bias, problem.targets, count, m, nll, part_m, part_s, overflow),
                n, v, d, splits.every, splits.narrow, most, *scalars,
                BM=dense_tile.BM, GROUP=configs.GROUP, DENSE=dense, COUNTED=by_count, **flags, STORE=store, tape=tape,
            )  # fmt: skip
        else:
            parts = (part_m, part_s, part_weighted, part_pz, part_argmax)
            launch(
                hopper.online_kernel, programs, device, *hopper.operands(e, c, None)[:2],
                *hopper.present(m, bias, problem.weight, problem.targets, count, nll, *parts),
                n, v, d, splits.every, splits.narrow, *scalars, GROUP=configs.GROUP, DENSE=dense, **flags, **wants,
                tape=tape,
            )  # fmt: skip

    def run(listed=False, relative=False, retry=False):
        number, narrow = (most, 0) if listed else (splits.every, splits.narrow)
        c_operand, c_descriptor = configs.operand(c, tile.BN, tile.BK, config)
        e_operand, from_descriptor = (e, False) if listed else configs.operand(e, tile.BM, tile.BK, config)
        panel_operand, panel_descriptor = None, False
        if store and relative:
            panel_operand, panel_descriptor = configs.operand(panel, tile.BM, tile.BN, config)
        launch(
            fold_kernel, row_blocks * number * (ROOM.value if by_count else 1), device,
            e_operand, c_operand, bias, problem.weight, problem.targets, rows, count,
            m if relative else None, nll, part_m, part_s, part_weighted, part_pz, part_argmax,
            panel_operand, overflow,
            n, v, d, number, narrow, most, programs, min(v, panel.shape[1]) if store else 0, *scalars,
            e.stride(0), c.stride(0), panel.stride(0) if store else 0,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, SPAN=dense_tile.BN, GROUP=configs.GROUP,
            DENSE=dense, LISTED=listed, COUNTED=by_count,
            E_DESCRIPTOR=from_descriptor, C_DESCRIPTOR=c_descriptor, EVEN_D=d % tile.BK == 0,
            PRECISION=configs.precision_of(e.dtype), FLATTEN=from_descriptor and c_descriptor,
            RELATIVE=relative, RETRY=retry, STORE=store and relative, PANEL_DESCRIPTOR=panel_descriptor,
            **flags, **wants, num_warps=tile.warps, num_stages=tile.stages, tape=tape,
        )  # fmt: skip

    if specialised:
        run_specialised()
    else:
        run(relative=relative)
    if relative:
        run(retry=True)
    if not once:
        run(listed=True)
    launch(
        merge_kernel, cdiv(n, 128), device,
        problem.targets, part_m, part_s, part_weighted, part_pz, part_argmax,
        problem.weight.float().sum() if weighted else None,
        nll, lse, smooth, entropy, prediction, m, s, count,
        n, v, *splits, programs, problem.ignore_index,
        **wants | dict(HAS_WEIGHT=weighted, WANT_SMOOTH=want_smooth), LINEAR=linear, DENSE=dense, COUNTED=by_count,
        BM=tile.BM, BLOCK=128, tape=tape,
    )  # fmt: skip
    return Fold(nll, lse, smooth, entropy, prediction, m, s, rows, count, panel, overflow)


def folds_all_rows(live, n):
    """Whether the fold runs over all n rows where `live` of them are valid: `is_dense` on the host."""
    return live * 8 >= n * configs.DENSE
