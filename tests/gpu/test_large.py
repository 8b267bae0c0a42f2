"""Sizes whose products pass 2^31: offsets are 64-bit. Values are analytic where float64 truth is too large."""

from math import exp, log

import pytest
import torch

from benchmarks.states import make

from .contract import DEVICE, hold, random_upstream, run, size

pytestmark = pytest.mark.large


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE)


def close(got, want, tolerance):
    return (got.double() - want).abs().max().item() <= tolerance


def test_tokens_times_vocabulary(cce):
    """N V = 2.6e9 with 4 MB of inputs; the rows past 2^31 / V are the ones that differ."""
    n, v = size((40000, 65536), (400, 655))
    e, c, targets = zeros(n, 16), zeros(v, 16), torch.zeros(n, dtype=torch.long, device=DEVICE)
    e[-64:, 0], c[0, 0], c[-1, 0] = 8, 1, 2
    targets[-32:] = v - 1
    got = run(cce.linear_cross_entropy, e, c, targets, reduction="none")
    lse = log(exp(8) + exp(16) + v - 2)
    assert close(got.loss[:-64], log(v), 1e-4)
    assert close(got.loss[-64:-32], lse - 8, 1e-4)
    assert close(got.loss[-32:], lse - 16, 1e-4)
    assert close(got.de[-32:, 0], exp(8 - lse) + 2 * exp(16 - lse) - 2, 1e-4)


def test_vocabulary_times_hidden(cce):
    """V D = 2.1e9 + 262144: the last 64 rows of c lie past 2^31."""
    v, d = size((524352, 4096), (5243, 64))
    e, c, targets = zeros(16, d), zeros(v, d), torch.full((16,), v - 1, device=DEVICE)
    e[:, 0], c[-1, 0] = 8, 2
    got = run(cce.linear_cross_entropy, e, c, targets)
    q = (v - 1) * exp(-16)
    assert close(got.loss, log(1 + q), 1e-5)
    assert close(got.dc[-1, 0], 8 * (1 / (1 + q) - 1), 4e-3)
    assert close(got.dc[:-1, 0], 8 * exp(-16) / (1 + q), 1e-8)
    assert not got.dc[:, 1:].any()


def test_tokens_times_hidden(cce):
    """N D = 2.15e9: the last rows of e, dE and its accumulator lie past 2^31."""
    n, d, v = size((1050000, 2048, 96), (1050, 64, 96))
    e, c, targets = zeros(n, d), zeros(v, d), torch.zeros(n, dtype=torch.long, device=DEVICE)
    e[-1, 0], c[1, 0], targets[-1] = 8, 1, 1
    got = run(cce.linear_cross_entropy, e, c, targets, reduction="none")
    lse = log(exp(8) + v - 1)
    assert close(got.loss[:-1], log(v), 1e-4)
    assert close(got.loss[-1], lse - 8, 1e-5)
    assert close(got.de[-1, 0], exp(8 - lse) - 1, 1e-3)
    assert close(got.de[:-1, 0], 1 / v, 1e-4)
    assert close(got.dc[1, 0], 8 * (exp(8 - lse) - 1), 4e-3)


@pytest.mark.parametrize("d", [64, 100])
def test_odd_everything(cce, d):
    """N = 65535, V = 176245, every option at once; d = 100 has rows that no descriptor can address."""
    n, v = size((65535, 176245), (255, 1245))
    s = make(n, v, d, torch.bfloat16, DEVICE, ignored=0.3)
    hold(
        cce, s.e, s.c, s.targets, s.bias, softcap=30.0, logit_scale=0.7, reduction="none", return_lse=True,
        upstream=random_upstream(n), upstream_lse=random_upstream(n, seed=2),
    )  # fmt: skip
