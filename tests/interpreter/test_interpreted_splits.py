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
    globals().update(walk=splits.walk, pair=splits.pair)
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
