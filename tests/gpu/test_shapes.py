"""Tiny, odd and empty sizes: every edge of a tile, in every extent."""

import pytest
import torch

from .contract import DEVICE, DTYPES, hold, random_inputs, run, same_bits, size

SHAPES = [
    (1, 1, 1), (1, 2, 3), (2, 1, 16), (16, 2, 8), (15, 17, 16), (16, 15, 17), (17, 16, 15), (17, 127, 129),
    (127, 129, 128), (128, 128, 128), (129, 128, 127), (128, 129, 64), (129, 257, 65), (1, 4097, 128), (300, 1, 64),
    (257, 255, 64), (64, 8191, 32), (255, 1000, 1001), (513, 2049, 1000), (31, 33, 2048),
]  # fmt: skip
SOME = [(1, 1, 1), (17, 16, 15), (127, 129, 128), (129, 257, 65), (255, 1000, 1001)]


def name(shape):
    return "x".join(map(str, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_bf16(cce, shape):
    e, c, targets, bias = random_inputs(*shape, ignored=0.1)
    hold(cce, e, c, targets, bias, return_lse=True)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("shape", SOME, ids=name)
def test_other_dtypes(cce, shape, dtype):
    e, c, targets, bias = random_inputs(*shape, DTYPES[dtype])
    hold(cce, e, c, targets, bias, reduction="none")


@pytest.mark.nothing_to_compute
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(cce, reduction):
    e, c, targets, bias = random_inputs(0, 100, 32)
    got = run(cce.linear_cross_entropy, e, c, targets, bias, reduction=reduction)
    assert got.loss.shape == ((0,) if reduction == "none" else ()) and not got.loss.any()
    assert got.de.shape == (0, 32) and not got.dc.any() and not got.dbias.any()


@pytest.mark.nothing_to_compute
@pytest.mark.parametrize("length", [0, 1])
def test_shift_leaves_nothing(cce, length):
    e, c, targets, _ = random_inputs(4 * length, 100, 32)
    got = run(
        cce.linear_cross_entropy, e.reshape(4, length, 32), c, targets.reshape(4, length), shift=True, reduction="none"
    )
    assert got.loss.shape == (4, max(length - 1, 0))
    assert not got.de.any() and not got.dc.any()


@pytest.mark.parametrize("leading", [(), (1,), (2, 3, 5)], ids=["scalar", "1", "2x3x5"])
def test_leading_dimensions(cce, leading):
    count = torch.Size(leading).numel()
    e, c, targets, bias = random_inputs(count, 100, 32)
    hold(cce, e.reshape(*leading, 32), c, targets.reshape(leading), bias, reduction="none", return_lse=True)


@pytest.mark.parametrize("panels", size([1, 2, 5], [1, 2, 3]))
def test_workspace_sets_the_panels_not_the_values(cce, panels):
    """The vocabulary is cut where the budget says; each cut gives the values that float64 gives."""
    n, v, d = 200, 2500, 64
    e, c, targets, bias = random_inputs(n, v, d)
    budgets = (b for b in range(1 << 16, 1 << 25, 1 << 14) if panels_at(cce, n, v, d, b) == panels)
    budget = next(budgets)
    got = hold(cce, e, c, targets, bias, workspace=budget)
    same_bits(got, run(cce.linear_cross_entropy, e, c, targets, bias, workspace=budget))


def panels_at(cce, n, v, d, workspace):
    try:
        return cce.plan(n, v, d, torch.bfloat16, device=DEVICE, need_dbias=True, workspace=workspace).panels
    except ValueError:
        return None
