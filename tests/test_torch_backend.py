"""The torch backend over tiles so small that every loop over them turns several times, with uneven last ones."""

import importlib

import pytest
import torch
from helpers import check, make_case

N, V, D = 37, 101, 16
OPTIONS = [
    {"schedule": "single_pass"},
    {"schedule": "single_pass", "softcap": 4.0, "temperature": 0.7},
    {"schedule": "recompute"},
    {"schedule": "recompute", "softcap": 4.0, "temperature": 0.7},
    {"bias": True, "label_smoothing": 0.1, "weight": True},
    {"bias": True, "softcap": 4.0, "z_loss": 0.01, "reduction": "none", "return_lse": True},
]


@pytest.fixture(params=[(5, 16), (64, 40)], ids=str)
def tiles(request, cce, monkeypatch):
    backend = importlib.import_module(f"{cce.__name__}.backends.torch")
    for name, size in zip(("ROWS", "COLUMNS"), request.param, strict=True):
        monkeypatch.setattr(backend, name, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_gradients_over_tiles(cce, tiles, options, dtype):
    check(cce, make_case(N, V, D, dtype, **options))


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_statistics_over_tiles(cce, tiles, softcap):
    check(cce, make_case(N, V, D, softcap=softcap), "linear_token_stats")


def test_an_infinite_upstream_gradient_leaves_zeros(cce):
    """Gradients of ignored rows are exactly 0 whatever single_pass's result is multiplied by."""
    case = make_case(N, V, D, schedule="single_pass")
    e = case.e.requires_grad_()
    cce.linear_cross_entropy(e, case.c, case.targets, **case.options).backward(torch.tensor(torch.inf))
    ignored = case.targets == -100
    assert (e.grad[ignored] == 0).all() and not e.grad[~ignored].isfinite().any()
