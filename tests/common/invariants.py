"""Identities that hold whatever the numbers are."""

import pytest
import torch
from common.poison import poisoned_memory  # noqa: F401
from helpers import DEVICE, DTYPES, SOME_DTYPES, make_case, once_rounded, pick, relative_error, run, truth

N, V, D = pick((60, 601, 48), (10, 70, 20))


def close(got, want, cce, case, name):
    """Two right answers differ by no more than twice what rounding once costs (and fp32 sums in another order)."""
    unavoidable = relative_error(once_rounded(cce, case)[0][name], truth(cce, case)[name])
    assert relative_error(got, want) <= 2 * unavoidable + torch.finfo(case.e.dtype).eps


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_permuting_the_vocabulary_permutes_dc(cce, dtype):
    case = make_case(N, V, D, dtype, bias=True)
    want = run(cce.linear_cross_entropy, case)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    place = torch.empty_like(order)
    place[order] = torch.arange(V, device=DEVICE)
    permuted = make_case(N, V, D, dtype, bias=True)
    permuted.c, permuted.bias = case.c[order], case.bias[order]
    permuted.targets = torch.where(case.targets == -100, -100, place[case.targets.clamp(min=0)])
    got = run(cce.linear_cross_entropy, permuted)
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0)
    for name, t in (("dc", want["dc"][order]), ("dbias", want["dbias"][order]), ("de", want["de"])):
        close(got[name], t, cce, case, name)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_permuting_tokens_permutes_de(cce, dtype):
    case = make_case(N, V, D, dtype, reduction="none")
    case.upstream["loss"] = torch.randn(N, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    want = run(cce.linear_cross_entropy, case)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    permuted = make_case(N, V, D, dtype, reduction="none")
    permuted.e, permuted.targets = case.e[order], case.targets[order]
    permuted.upstream["loss"] = case.upstream["loss"][order]
    got = run(cce.linear_cross_entropy, permuted)
    torch.testing.assert_close(got["loss"], want["loss"][order], rtol=1e-6, atol=1e-6)
    close(got["de"], want["de"][order], cce, case, "de")
    close(got["dc"], want["dc"], cce, case, "dc")


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_splitting_the_batch_adds_gradients(cce, dtype):
    case = make_case(N, V, D, dtype, bias=True, reduction="sum")
    whole = run(cce.linear_cross_entropy, case)
    parts = []
    for rows in (slice(0, N // 3), slice(N // 3, N)):
        part = make_case(N, V, D, dtype, bias=True, reduction="sum")
        part.e, part.targets = case.e[rows], case.targets[rows]
        parts.append(run(cce.linear_cross_entropy, part))
    torch.testing.assert_close(sum(p["loss"] for p in parts), whole["loss"], rtol=1e-6, atol=0)
    close(torch.cat([p["de"] for p in parts]), whole["de"], cce, case, "de")
    for name in ("dc", "dbias"):
        close(sum(p[name].double() for p in parts), whole[name], cce, case, name)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("constant", [-64.0, 8.0, 1024.0])
def test_a_constant_added_to_every_logit_changes_nothing_but_the_lse(cce, constant, dtype):
    case = make_case(N, V, D, dtype, reduction="none", return_lse=True)
    case.upstream["lse"] = torch.ones(N, device=DEVICE)
    case.bias = torch.zeros(V, device=DEVICE)
    want = run(cce.linear_cross_entropy, case)
    case.bias = torch.full((V,), constant, device=DEVICE)
    got = run(cce.linear_cross_entropy, case)
    step = abs(constant) * 2**-23
    valid = case.targets != -100
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-5, atol=4 * step)
    torch.testing.assert_close(got["lse"], want["lse"] + constant * valid, rtol=1e-6, atol=step)
    for name in ("de", "dc", "dbias"):
        assert relative_error(got[name], want[name]) <= torch.finfo(case.e.dtype).eps + 16 * step, name


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"softcap": None, "temperature": 0.5}, {"bias": True}]
)
def test_rows_of_dlogits_sum_to_zero(cce, options):
    """The identity in place of c makes dE the panel itself; in fp32 nothing rounds it."""
    n, v = pick((40, 300), (6, 40))
    case = make_case(n, v, v, reduction="sum", ignored=0.1, spread=0.0, **options)
    case.e = torch.randn(n, v, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 3
    case.c = torch.eye(v, device=DEVICE)
    panel = run(cce.linear_cross_entropy, case)["de"]
    assert panel.abs().sum() > n / 2
    assert panel.double().sum(1).abs().max() <= 2e-6 / options.get("temperature", 1.0)


def test_rows_of_dlogits_sum_to_the_upstream_gradient_of_lse(cce):
    n, v = pick((40, 300), (6, 40))
    case = make_case(n, v, v, reduction="none", return_lse=True, ignored=0.0)
    case.c = torch.eye(v, device=DEVICE)
    case.upstream["lse"] = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    panel = run(cce.linear_cross_entropy, case)["de"]
    torch.testing.assert_close(panel.double().sum(1), case.upstream["lse"].double(), rtol=1e-5, atol=2e-6)


def test_scaling_the_upstream_gradient_by_two_scales_gradients_exactly(cce):
    case = make_case(N, V, D, DTYPES[0], bias=True)
    case.upstream["loss"] = torch.tensor(1.0, device=DEVICE)
    once = run(cce.linear_cross_entropy, case)
    case.upstream["loss"] = torch.tensor(2.0, device=DEVICE)
    twice = run(cce.linear_cross_entropy, case)
    for name in ("de", "dc", "dbias"):
        assert torch.equal(twice[name], once[name] * 2) or relative_error(twice[name], once[name] * 2) < 1e-4, name


def test_a_padded_vocabulary_is_the_real_one(cce):
    """Rows of c beyond vocab_size are no tokens: any value in them, NaN included, changes nothing."""
    case = make_case(N, V, D, bias=True, vocab_size=V - 6, label_smoothing=0.1, weight=True)
    got = run(cce.linear_cross_entropy, case)
    real = make_case(N, V, D, bias=True, vocab_size=V - 6, label_smoothing=0.1, weight=True)
    real.c, real.bias = real.c[:-6], real.bias[:-6]
    real.options |= {"vocab_size": None, "weight": real.options["weight"][:-6]}
    want = run(cce.linear_cross_entropy, real)
    case.c[-6:], case.bias[-6:], case.options["weight"][-6:] = float("nan"), float("inf"), float("nan")
    filled = run(cce.linear_cross_entropy, case)
    for name in ("loss", "de"):
        torch.testing.assert_close(got[name], want[name])
        assert torch.equal(filled[name], got[name])
    for name in ("dc", "dbias"):
        torch.testing.assert_close(got[name][:-6], want[name])
        assert (filled[name][-6:] == 0).all()
