"""linear_token_stats: log-probability, lse, entropy, prediction and correctness of each token."""

import math

import pytest
import torch
from common.poison import poisoned_memory  # noqa: F401
from helpers import DEVICE, DTYPES, SOME_DTYPES, STATS, check, make_case, pick, run

N, V, D = pick((50, 521, 40), (9, 70, 20))
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": 0.37},
    "temperature": {"temperature": 0.7},
    "vocab_size": {"vocab_size": V - 9},
    "shift": {"shift": True},
    "ignore_index": {"ignore_index": 3},
    "all": {
        "bias": True, "softcap": 5.0, "logit_scale": 0.37, "temperature": 0.7, "vocab_size": V - 9, "shift": True,
        "ignore_index": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_statistics(cce, options, dtype):
    case = make_case((2, N), V, D, dtype, **OPTIONS[options])
    got = check(cce, case, "linear_token_stats")
    assert got["prediction"].dtype == torch.int64 and got["correct"].dtype == torch.bool


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("asked", [("logprob",), ("lse",), ("entropy",), ("logprob", "entropy"), ("lse", "entropy")])
def test_any_combination_of_upstream_gradients(cce, asked, dtype):
    """Outputs left out of the backward get no gradient at all, not one of zeros."""
    case = make_case(N, V, D, dtype, bias=True)
    for name in ("logprob", "lse", "entropy"):
        if name not in asked:
            case.upstream[name] = torch.zeros(N, device=DEVICE)
    check(cce, case, "linear_token_stats")

    e = case.e.clone().requires_grad_()
    stats = cce.linear_token_stats(e, case.c, case.targets, case.bias)
    sum(getattr(stats, name).sum() for name in asked).backward()
    for name in asked:
        case.upstream[name] = torch.ones(N, device=DEVICE)
    torch.testing.assert_close(e.grad, run(cce.linear_token_stats, case)["de"])


def test_prediction_and_correct_are_not_differentiable(cce):
    case = make_case(N, V, D)
    stats = cce.linear_token_stats(case.e.requires_grad_(), case.c, case.targets)
    assert [getattr(stats, name).requires_grad for name in STATS] == [True, True, True, False, False]


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_ignored_rows(cce, dtype):
    case = make_case(N, V, D, dtype, ignored=0.5)
    ignored = case.targets == -100
    case.e[ignored] = math.nan
    got = run(cce.linear_token_stats, case)
    for name in ("logprob", "lse", "entropy", "de"):
        assert (got[name][ignored] == 0).all(), name
        assert got[name].isfinite().all(), name
    assert (got["prediction"][ignored] == -1).all()
    assert not got["correct"][ignored].any()


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(cce, shape):
    got = run(cce.linear_token_stats, make_case(shape, V, D))
    assert all(got[name].shape == shape for name in STATS)
    assert torch.equal(got["dc"], torch.zeros(V, D, device=DEVICE))


def test_ties_go_to_the_lowest_id(cce):
    """Equal rows of c within a tile, in different tiles, and in different splits of the vocabulary."""
    v = pick(3001, 300)
    e = torch.ones(4, 16, device=DEVICE)
    for tied in ([0, v - 1], [5, 6], [v // 2, v - 1], [v - 2, v - 1], list(range(v))):
        c = torch.zeros(v, 16, device=DEVICE)
        c[tied] = 1.0
        stats = cce.linear_token_stats(e, c, torch.full((4,), tied[0], device=DEVICE))
        assert stats.prediction.tolist() == [tied[0]] * 4
        assert stats.correct.all()


def test_entropy_of_known_distributions(cce):
    """Uniform: ln V. One finite logit: 0. Two equal finite logits among -inf: ln 2. No NaN in gradients."""
    e = torch.ones(1, 16, device=DEVICE, requires_grad=True)
    c = torch.zeros(V, 16, device=DEVICE, requires_grad=True)
    target = torch.tensor([3], device=DEVICE)
    only = torch.full((V,), -math.inf, device=DEVICE)
    only[3] = 0
    two = only.clone()
    two[V - 1] = 0
    for bias, want in ((None, math.log(V)), (only, 0.0), (two, math.log(2))):
        stats = cce.linear_token_stats(e, c, target, bias)
        assert abs(stats.entropy.item() - want) < 1e-6
        gradients = torch.autograd.grad(stats.entropy.sum() + stats.logprob.sum(), (e, c))
        assert all(g.isfinite().all() for g in gradients)


def test_entropy_under_a_common_offset(cce):
    """All logits 16384: entropy ln V, log-probability -ln V."""
    e, c = torch.full((2, 16), 32.0, device=DEVICE), torch.full((V, 16), 32.0, device=DEVICE)
    stats = cce.linear_token_stats(e, c, torch.tensor([0, V - 1], device=DEVICE))
    torch.testing.assert_close(stats.entropy, torch.full_like(stats.entropy, math.log(V)), rtol=1e-6, atol=0)
    torch.testing.assert_close(stats.logprob, torch.full_like(stats.entropy, -math.log(V)), rtol=1e-6, atol=0)


def test_agrees_with_the_loss(cce):
    case = make_case((2, N), V, D, bias=True, softcap=5.0, shift=True)
    stats = cce.linear_token_stats(case.e, case.c, case.targets, case.bias, softcap=5.0, shift=True)
    loss, lse = cce.linear_cross_entropy(
        case.e, case.c, case.targets, case.bias, softcap=5.0, shift=True, reduction="none", return_lse=True
    )
    torch.testing.assert_close(-stats.logprob, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.lse, lse, rtol=1e-6, atol=1e-6)


def test_policy_gradient(cce):
    """The use in reinforcement learning: a clipped ratio against old log-probabilities plus an entropy bonus."""
    case = make_case((3, N), V, D, DTYPES[0])
    old = torch.randn(3, N, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 0.1
    advantage = torch.randn(3, N, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def objective(stats):
        ratio = (stats.logprob - stats.logprob.detach() + old.to(stats.logprob)).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        return -(clipped + 0.01 * stats.entropy).mean()

    e, c = case.e.clone().requires_grad_(), case.c.clone().requires_grad_()
    objective(cce.linear_token_stats(e, c, case.targets)).backward()
    f, d = case.e.double().requires_grad_(), case.c.double().requires_grad_()
    objective(cce.reference.linear_token_stats(f, d, case.targets)).backward()
    eps = torch.finfo(e.dtype).eps
    assert (e.grad.double() - f.grad).norm() <= eps * f.grad.norm()
    assert (c.grad.double() - d.grad).norm() <= eps * d.grad.norm()
