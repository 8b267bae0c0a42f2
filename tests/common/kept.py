"""`recompute` with exponentials kept since the forward, of some classes up to all.

What it would save in sizes this small is not worth a launch or a sum in fp32, so here these cost nothing.
"""

import importlib

import pytest
import torch
from common.bfloat16 import teach_bfloat16
from helpers import INTERPRET, check, make_case, run

N, V, D = 21, 268, 16
KEPT = {"some": 128, "most": 192, "all": V}
DTYPES = (torch.bfloat16, torch.float32)
ALL = 1 << 30
LSE = {"return_lse": True, "reduction": "sum"}


@pytest.fixture(autouse=True)
def keeping_pays(cce, monkeypatch):
    planner = importlib.import_module(f"{cce.__name__}.planner")
    monkeypatch.setattr(planner, "PANEL_STEP", 64)
    monkeypatch.setattr(planner, "PANEL", 0.0)
    monkeypatch.setattr(planner, "KEEPING", 0.0)
    monkeypatch.setattr(planner, "_waves", lambda rows, d: 1)
    for rate in ("PASS_RATE", "SUM_RATE"):
        monkeypatch.setattr(planner, rate, float("inf"))
    planner.plan.cache_clear()
    if INTERPRET:
        teach_bfloat16(monkeypatch)


def workspace_for(cce, kept, dtype, **needs):
    """The least budget, up to a percent, in which so many columns are kept."""
    low, high = 0, ALL
    while high - low > max(low // 100, 64):
        middle = (low + high) // 2
        try:
            enough = cce.plan(N, V, D, dtype, workspace=middle, schedule="recompute", **needs).kept >= kept
        except ValueError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    assert cce.plan(N, V, D, dtype, workspace=high, schedule="recompute", **needs).kept == kept
    return high


def keeping(cce, kept, dtype=torch.float32, bias=False, **options):
    workspace = workspace_for(cce, KEPT[kept], dtype, need_dbias=bias)
    options = {"reduction": "none", "ignored": 1 / 12} | options
    return make_case(N, V, D, dtype, bias=bias, schedule="recompute", workspace=workspace, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_lse": True, "bias": True},
        {"softcap": 20.0, "temperature": 0.7},
        {"weight": True, "bias": True},
        {"label_smoothing": 0.5, "logit_scale": 1.5},
        {"label_smoothing": 0.5, "weight": True, "bias": True, **LSE},
    ],
    ids=["plain", "lse+bias", "softcap", "weight", "smooth", "smooth+weight+lse"],
)
def test_any_number_of_columns(cce, dtype, kept, options):
    check(cce, keeping(cce, kept, dtype, **options))


def test_fewer_panels_are_rebuilt(cce):
    launches = cce.backends.triton_backend.launches

    def rebuilt(kept, **options):
        case = keeping(cce, kept, **options)
        run(cce.linear_cross_entropy, case)
        before = launches["dlogits_kernel"]
        run(cce.linear_cross_entropy, case)
        return launches["dlogits_kernel"] - before

    # One launch looks whether kept exponentials have overflown.
    for options in ({}, {"label_smoothing": 0.1}):
        assert rebuilt("all", **options) == 1 < rebuilt("some", **options)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.6}, {"label_smoothing": 0.1, "softcap": 20.0}])
def test_smoothing_that_keeps_nothing(cce, options):
    """Where the gradient of a class may be all that is left of two that nearly cancel."""
    launches = cce.backends.triton_backend.launches
    before = launches["factor_kernel"]
    check(cce, keeping(cce, "all", **options))
    assert launches["factor_kernel"] == before


@pytest.mark.parametrize("kept", ["some", "all"])
def test_what_ignored_rows_hold_does_not_matter(cce, kept):
    case = keeping(cce, kept, bias=True)
    ignored = case.targets == -100
    assert 0 < ignored.sum() < N / 8
    case.e[ignored] = float("nan")
    case.upstream["loss"] = torch.where(ignored, float("nan"), 1.0)
    got = run(cce.linear_cross_entropy, case)
    assert not got["de"][ignored].any()
    case.e[ignored], case.upstream["loss"] = 0.0, (~ignored).float()
    check(cce, case)
    again = run(cce.linear_cross_entropy, case)
    for name in ("loss", "de", "dc", "dbias"):
        assert torch.equal(got[name], again[name])


@pytest.mark.parametrize("kept", ["some", "all"])
def test_mostly_ignored(cce, kept):
    """The fold then runs over the list of valid rows and keeps nothing."""
    check(cce, keeping(cce, kept, ignored=0.6, bias=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_distant_target(cce, dtype):
    """Exponentials relative to a logit 100 nats below the rest are no use: all are rebuilt."""
    case = keeping(cce, "most", dtype, bias=True, ignored=0.0)
    case.bias[case.targets[3]] = -100
    check(cce, case)


@pytest.mark.parametrize("needs", [("e",), ("c",), ("bias",), ("c", "bias")], ids="+".join)
def test_only_demanded_gradients(cce, needs):
    wanted = {f"need_d{name}": name in needs for name in ("e", "c", "bias")}
    case = keeping(cce, "most", bias=True).but(workspace=workspace_for(cce, KEPT["most"], torch.float32, **wanted))
    check(cce, case, needs=needs)


def test_a_second_backward(cce):
    case = keeping(cce, "most", return_lse=True)
    e, c = case.e.clone().requires_grad_(), case.c.clone().requires_grad_()
    loss, lse = cce.linear_cross_entropy(e, c, case.targets, **case.options)

    def gradients(upstream, upstream_lse):
        return torch.autograd.grad([loss, lse], [e, c], [upstream, upstream_lse], retain_graph=True)

    ones = torch.ones(N)
    first, _, third = gradients(ones, 0 * ones), gradients(2 * ones, -ones), gradients(ones, 0 * ones)
    assert all(map(torch.equal, first, third))


def test_what_keeps_nothing(cce):
    """Calls without a budget, float16, and plain torch operations."""
    assert cce.plan(N, V, D, torch.float32, workspace=ALL, schedule="recompute").kept == V
    assert cce.plan(N, V, D, torch.float32, schedule="recompute").kept == 0
    assert cce.plan(N, V, D, torch.float16, workspace=ALL, schedule="recompute").kept == 0
    assert cce.plan(N, V, D, torch.float32, workspace=ALL, schedule="recompute", device="cpu").kept == 0
