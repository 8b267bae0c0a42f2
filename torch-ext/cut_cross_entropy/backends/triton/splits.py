"""How the fold is divided: pairs of a row block and a split of the vocabulary, and which program takes which.

All splits are regular, of the same width up to a tile; or the last one has `narrow` tiles. Its pairs are for the
programs that are left over where the others are taken in full rounds: of 132, the four beside 128 regular pairs.
"""

import triton
import triton.language as tl

from .logits import grouped

# Pairs of fewer row blocks may be so many times as many as those of all.
ROOM: tl.constexpr = tl.constexpr(2)


@triton.jit
def is_dense(count, N, DENSE: tl.constexpr):
    """At least DENSE / 8 of the rows are valid: then the fold runs over all of them."""
    return tl.load(count).to(tl.int64) * 8 >= N.to(tl.int64) * DENSE


@triton.jit
def regular(splits, narrow):
    """How many splits are of the same width."""
    return splits - tl.minimum(narrow, 1)


@triton.jit
def counted(count, N, splits, narrow, most, programs, BM: tl.constexpr):
    """Row blocks of the first `count` rows, and the splits of them, the narrow one's tiles last.

    Of fewer row blocks than N has, as many regular splits, up to `most`, as let `programs` side by side be done first:
    a sixty-fourth sooner for each that is one more, since it costs as well.
    """
    every, blocks = tl.cdiv(N, BM), tl.cdiv(tl.minimum(tl.load(count), N), BM)
    best = regular(splits, narrow)
    last = tl.minimum(most, ROOM * every * splits // tl.maximum(blocks, 1))
    for more in range(best + 1, tl.where(blocks == every, 0, last) + 1):
        sooner = tl.cdiv(blocks * more, programs) * best * 64 < tl.cdiv(blocks * best, programs) * more * 63
        best = tl.where(sooner, more, best)
    return blocks, tl.where(blocks == every, splits, best), tl.where(blocks == every, narrow, 0)


@triton.jit
def walk(blocks, splits, narrow):
    """Numbers of the pairs of this program, of a few that take all of them in turn: start, stop, step.

    Of regular splits as many programs take pairs as it needs for the least number of rounds.
    """
    i, programs = tl.program_id(0), tl.num_programs(0)
    pairs = blocks * regular(splits, narrow)
    taking = tl.cdiv(pairs, tl.maximum(tl.cdiv(pairs, programs), 1))
    start, stop = tl.where(i < taking, i, pairs + i - taking), tl.where(i < taking, pairs, blocks * splits)
    return start, stop, tl.where(i < taking, taking, programs - taking)


@triton.jit
def pair(i, blocks, splits, narrow, V, SPAN: tl.constexpr, GROUP: tl.constexpr):
    """Of pair number i the row block, the split, and its first and last multiple of SPAN columns."""
    spans, number = tl.cdiv(V, SPAN), regular(splits, narrow)
    shared = (spans - narrow).to(tl.int64)
    if i < blocks * number:
        i_m, i_s = grouped(i, blocks, number, GROUP)
        first, last = (shared * i_s // number).to(tl.int32), (shared * (i_s + 1) // number).to(tl.int32)
    else:
        i_m, i_s = i - blocks * number, number
        first, last = spans - narrow, spans
    return i_m, i_s, first, last
