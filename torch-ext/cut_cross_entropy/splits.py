"""How many splits of the vocabulary the fold makes: a cost model on sizes. Who folds which is in backends/triton."""

import functools
import math
from typing import NamedTuple

# Bytes of hidden states that stay in L2 while the vocabulary goes by.
L2_ROWS = 40 << 20
# What a narrow split of the fold has to save: its programs are elsewhere in the vocabulary than the others.
NARROW = 1 + 1 / 256


class Splits(NamedTuple):
    """Of the vocabulary by the fold: over all rows, of which the last has `narrow` tiles where that is not 0, and over
    a list of valid rows that may be a tenth of them.
    """

    every: int
    narrow: int
    listed: int


@functools.lru_cache(1024)
def forward_splits(n: int, v: int, d: int, *, block_m: int, block_n: int, processors: int) -> Splits:
    """The splits with which `processors` programs, that take pairs of a row block and a split in turn, are done first.

    Those are splits whose pairs fill whole rounds, or nearly: the programs that are left over then share the pairs of a
    narrow one. A split costs a tenth of a tile besides, and a partial 8 bytes a row: V / 1024 of them are 0.4 % of
    16-bit logits. Programs in flight may read as many row blocks side by side; more of them than L2_ROWS would not
    stay in L2 while the vocabulary goes by.
    """
    row_blocks, tiles = -(-max(n, 1) // block_m), -(-v // block_n)
    least = min(tiles, max(1, round(min(processors, row_blocks) * block_m * d * 2 / L2_ROWS)))
    most = min(tiles, max(least, -(-4 * processors // row_blocks), min(v // 1024, 64)))

    def rounds_of(wide):
        """Pairs that a program takes of so many splits that are alike, and the programs that take none."""
        rounds = -(-row_blocks * wide // processors)
        return rounds, processors - -(-row_blocks * wide // rounds)

    def narrow_beside(wide):
        """Tiles of a narrow split that keep those programs busy for as long as the others."""
        rounds, left_over = rounds_of(wide)
        return tiles * rounds // (rounds + -(-row_blocks // left_over) * wide) if left_over else 0

    def longest(wide, narrow):
        """Tiles of the program that has most of them."""
        rounds, left_over = rounds_of(wide)
        mean = (tiles - narrow) / wide
        found = rounds * (mean + 0.1) + min(1, rounds * (math.ceil(mean) - mean))
        return max(found, -(-row_blocks // left_over) * (narrow + 0.1)) * NARROW if narrow else found

    choices = [(wide, 0) for wide in range(least, most + 1)]
    choices += [(wide, narrow) for wide in range(least, most) if (narrow := narrow_beside(wide))]
    wide, narrow = min(choices, key=lambda choice: longest(*choice))
    every = wide + (narrow > 0)
    return Splits(every, narrow, min(tiles, max(every, min(-(-16 * processors // row_blocks), v // 1024))))
