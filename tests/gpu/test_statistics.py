"""Logprob, lse, entropy and prediction of every token, and the gradients of the first three, against float64."""

import pytest
import torch

from benchmarks.states import make
from benchmarks.truth import GRADIENT_BOUND, LOSS_BOUND, relative_error

from .contract import DEVICE, random_upstream, size

N, V, D = size((2048, 65011, 1024), (40, 331, 64))


@pytest.mark.parametrize("ignored", [0.0, 0.02, 0.6])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_contract(cce, softcap, ignored):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=ignored)
    upstream = [random_upstream((N,), seed=seed) for seed in range(3)]

    def step(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (s.e, s.c)]
        stats = function(*leaves, s.targets, softcap=softcap)
        values = (stats.logprob, stats.lse, stats.entropy)
        gradients = torch.autograd.grad(values, leaves, [g.to(stats.lse.dtype) for g in upstream])
        return torch.stack(values).detach(), *gradients, stats.prediction

    got, again = (step(cce.linear_token_stats, torch.bfloat16) for _ in range(2))
    assert all(map(torch.equal, got, again))
    values, de, dc, prediction = step(cce.reference.linear_token_stats, torch.float64)
    assert ((got[0] - values).abs() / values[1].abs().clamp(min=1.0)).max() <= LOSS_BOUND
    errors = {"de": relative_error(got[1], de), "dc": relative_error(got[2], dc)}
    assert all(error <= size(1, 2) * GRADIENT_BOUND[torch.bfloat16] for error in errors.values()), errors
    assert not got[1][s.targets == -100].any()
    # Two logits that differ by less than fp32 tells apart are a tie there.
    assert (got[3] == prediction).float().mean() > 0.999
