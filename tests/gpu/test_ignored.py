"""Ignored targets: no loss, no gradient, no arithmetic, wherever they lie and however many they are."""

import pytest
import torch

from benchmarks.states import make

from .contract import DEVICE, hold, size


@pytest.fixture(autouse=True, params=["list of valid rows", "all rows"])
def small_problems(request, cce, monkeypatch):
    """Problems as small as these are folded over all rows unless the threshold is moved."""
    if request.param == "list of valid rows" and DEVICE == "cuda":
        monkeypatch.setattr(cce.backends.triton_backend.configs, "SMALL", 0)


N, V, D = size((1500, 4001, 192), (300, 401, 64))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
def test_share_scattered(cce, share, reduction):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=share)
    got = hold(cce, s.e, s.c, s.targets, s.bias, reduction=reduction)
    assert not got.de[s.targets == -100].any()
    if share == 1:
        assert not got.loss.any() and not got.dc.any() and not got.dbias.any()


@pytest.mark.parametrize("pattern", ["prompt", "all-but-last", "all-but-first", "every-second", "whole-tiles"])
def test_pattern(cce, pattern):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=0)
    at = torch.arange(N, device=DEVICE)
    ignored = {
        "prompt": at < 0.7 * N,
        "all-but-last": at < N - 1,
        "all-but-first": at > 0,
        "every-second": at % 2 == 0,
        "whole-tiles": (at // 128) % 2 == 0,
    }[pattern]
    hold(cce, s.e, s.c, s.targets.masked_fill(ignored, -100), reduction="sum", return_lse=True)


@pytest.mark.parametrize("share", [0.01, 0.9])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_content_of_ignored_rows_is_never_used(cce, value, share):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=share)
    clean = hold(cce, s.e, s.c, s.targets)
    s.e[s.targets == -100] = value
    got = hold(cce, s.e, s.c, s.targets)
    assert torch.equal(got.loss, clean.loss) and torch.equal(got.dc, clean.dc) and torch.equal(got.de, clean.de)


@pytest.mark.parametrize("ignore_index", [0, 7, -1, 10**9])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ignore_index_and_target_dtype(cce, ignore_index, dtype):
    """Ids of the vocabulary can be ignored, so can numbers outside it."""
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=0.2, ignore_index=ignore_index)
    hold(cce, s.e, s.c, s.targets.to(dtype), ignore_index=ignore_index)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_valid_row_that_is_not_finite_stays_alone(cce, value):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=0)
    clean = cce.linear_cross_entropy(s.e, s.c, s.targets, reduction="none")
    s.e[N // 2] = value
    got = cce.linear_cross_entropy(s.e, s.c, s.targets, reduction="none")
    others = torch.arange(N, device=DEVICE) != N // 2
    assert not got[N // 2].isfinite()
    assert torch.equal(got[others], clean[others])
