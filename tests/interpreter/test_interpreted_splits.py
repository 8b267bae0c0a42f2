"""Which program folds what: every tile once, and the work of the programs nearly equal where it can be."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

PROCESSORS, SPAN = 132, 256


@pytest.fixture(scope="module")
def division(cce):
    """`forward_splits`, and the kernel below over the loaded module's own functions."""
    splits = importlib.import_module(f"{cce.__name__}.backends.triton.splits")
    globals().update(walk=splits.walk, pair=splits.pair, counted=splits.counted, ROOM=splits.ROOM.value)
    return importlib.import_module(f"{cce.__name__}.splits").forward_splits


@triton.jit
def tiles_kernel(seen, part, load, blocks, splits, narrow, V, SPAN: tl.constexpr, GROUP: tl.constexpr):
    """Counts per [row block, tile], the split it is in, and tiles per program."""
    tiles, mine = tl.cdiv(V, SPAN), 0
    start, stop, stride = walk(blocks, splits, narrow)  # noqa: F821
    for i in range(start, stop, stride):
        i_m, i_s, first, last = pair(i, blocks, splits, narrow, V, SPAN, GROUP)  # noqa: F821
        for i_t in range(first, last):
            at = i_m * tiles + i_t
            tl.store(seen + at, tl.load(seen + at) + 1)
            tl.store(part + at, i_s)
            mine += 1
    tl.store(load + tl.program_id(0), mine)


def divided(blocks, splits, narrow, v, programs):
    tiles = -(-v // SPAN)
    seen, part, load = (torch.zeros(size, dtype=torch.int32) for size in ((blocks, tiles), (blocks, tiles), programs))
    tiles_kernel[(programs,)](seen, part, load, blocks, splits, narrow, v, SPAN=SPAN, GROUP=16)
    return seen, part, load


@pytest.mark.parametrize("n, v, d, block_m, idle", [
    (8192, 32000, 4096, 128, 0.01), (8192, 32000, 4096, 192, 0.01), (4096, 32000, 4096, 128, 0.03),
    (8192, 40000, 1024, 128, 0.02), (6016, 32000, 2048, 128, 0.05), (1000, 5001, 64, 128, 0.4), (1, 300, 8, 128, 0.985),
])  # fmt: skip
def test_every_tile_once(division, n, v, d, block_m, idle):
    blocks = -(-n // block_m)
    splits = division(n, v, d, block_m=block_m, block_n=SPAN, processors=PROCESSORS)
    programs = min(blocks * splits.every, PROCESSORS)
    seen, part, load = divided(blocks, splits.every, splits.narrow, v, programs)
    assert (seen == 1).all()
    assert (part.diff(dim=1) >= 0).all() and part.max() == splits.every - 1
    assert 0 <= splits.narrow < seen.shape[1] and splits.every <= splits.listed <= seen.shape[1]
    assert load.sum() >= (1 - idle) * load.max() * PROCESSORS


@pytest.mark.parametrize("blocks, splits, narrow, programs", [(3, 2, 1, 4), (7, 3, 2, 16), (1, 2, 5, 9), (5, 4, 1, 19)])
def test_any_narrow_split(division, blocks, splits, narrow, programs):
    """Also where other programs than the planner's are left over."""
    seen, part, _ = divided(blocks, splits, narrow, 12 * SPAN - 3, programs)
    assert (seen == 1).all()
    assert (part == splits - 1).sum() == blocks * narrow


def test_no_rows(division):
    seen, _, load = divided(0, 3, 1, 1000, 5)
    assert not seen.numel() and not load.any()


@triton.jit
def counted_kernel(out, count, N, splits, narrow, most, programs, BM: tl.constexpr):
    blocks, splits, narrow = counted(count, N, splits, narrow, most, programs, BM)  # noqa: F821
    tl.store(out, blocks)
    tl.store(out + 1, splits)
    tl.store(out + 2, narrow)


@pytest.mark.parametrize("n, v, d", [(4096, 128256, 4096), (8192, 32000, 2048), (1024, 128256, 2048), (300, 521, 40)])
def test_splits_of_fewer_rows(division, n, v, d):
    """Those of all rows where the row blocks are as many; else as quick as any, up to what one more split costs."""
    of_all = division(n, v, d, block_m=128, block_n=SPAN, processors=PROCESSORS)
    every = -(-n // 128)
    programs = min(every * of_all.every, PROCESSORS)
    regular = of_all.every - (of_all.narrow > 0)
    for count in (0, 1, n // 8, n // 2, n * 13 // 16, n * 7 // 8, n - 1, n):
        out = torch.zeros(3, dtype=torch.int32)
        counted_kernel[(1,)](out, torch.tensor([count]), n, *of_all[:2], of_all.listed, programs, BM=128)
        blocks, splits, narrow = out.tolist()
        assert blocks == -(-count // 128)
        if blocks == every:
            assert (splits, narrow) == of_all[:2]
            continue
        allowed = range(regular, min(of_all.listed, ROOM * every * of_all.every // max(blocks, 1)) + 1)  # noqa: F821
        rounds = {number: -(-blocks * number // programs) / number for number in allowed}
        assert narrow == 0 and splits in rounds and 63 * rounds[splits] <= 64 * min(rounds.values())
