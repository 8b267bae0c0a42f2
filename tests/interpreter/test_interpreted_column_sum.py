"""The sum of a matrix's rows, which is the gradient of a bias."""

import importlib

import pytest
import torch


@pytest.mark.parametrize("rows, columns", [(1, 1), (9, 141), (64, 128), (700, 8), (300, 130)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_column_sum(cce, rows, columns, dtype, weighted):
    """A piece of a wider panel, next to NaN, within the rounding of fp32 and in the same order every time."""
    column_sum = importlib.import_module(f"{cce.__name__}.backends.triton.column_sum").column_sum
    generator = torch.Generator().manual_seed(rows)
    panel = torch.full((rows, columns + 24), torch.nan, dtype=dtype)
    piece = panel[:, 8 : 8 + columns]
    piece.copy_(torch.randn(rows, columns, generator=generator))
    weight = torch.rand(rows, generator=generator) if weighted else None
    terms = piece.double() if weight is None else piece.double() * weight.double()[:, None]
    got = column_sum(piece, weight)
    assert got.dtype == torch.float32 and got.shape == (columns,)
    assert ((got - terms.sum(0)).abs() <= 16 * 2**-24 * terms.abs().sum(0)).all()
    assert torch.equal(got, column_sum(piece, weight))
