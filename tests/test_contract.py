"""The yardstick itself: the reference against F.cross_entropy and finite differences, the contract against faults."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check, make_case, once_rounded, relative_error, run, truth


class Kernel:
    """A package made of one function, to be held to the contract."""

    def __init__(self, cce, function):
        self.reference, self.linear_cross_entropy = cce.reference, function


def materialized(dtype=None, panel=None):
    """F.cross_entropy over logits in the dtype of the inputs or in `dtype`, gradients of logits through `panel`."""

    def loss(e, c, targets, bias=None, reduction="mean", **_):
        logits = F.linear(e, c, bias) if dtype is None else F.linear(e.to(dtype), c.to(dtype))
        if panel is not None:
            logits = Panel.apply(logits, panel)
        return F.cross_entropy(logits.float(), targets, reduction=reduction)

    return loss


class Panel(torch.autograd.Function):
    """Identity whose gradient passes through a function."""

    @staticmethod
    def forward(ctx, logits, function):
        ctx.function = function
        return logits.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.function(grad), None


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_accepts_a_panel_rounded_once(cce, dtype):
    if dtype == torch.float32:
        accurate = materialized(torch.float32)
    else:
        accurate = materialized(torch.float32, lambda g: (g * 1024).to(dtype).float() / 1024)
    check(Kernel(cce, accurate), make_case(200, 300, 64, dtype, reduction="sum"))


FAULTS = {
    "logits in 16 bits": materialized(),
    "panel off by 1 %": materialized(torch.float32, lambda g: g * 1.01),
    "target gradient lost": materialized(torch.float32, lambda g: g.clamp(min=0)),
    "wrong divisor": lambda *args, **kw: materialized(torch.float32)(*args, **kw) * 1.001,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_contract_refuses(cce, fault):
    with pytest.raises(AssertionError):
        check(Kernel(cce, FAULTS[fault]), make_case(200, 300, 64, torch.bfloat16, reduction="mean"))


def test_once_rounded_is_the_truth_rounded(cce):
    case = make_case(60, 90, 20, torch.bfloat16, bias=True, label_smoothing=0.1, shift=True, softcap=4.0, vocab_size=80)
    want, (model, _) = truth(cce, case), once_rounded(cce, case)
    for name, t in model.items():
        assert 1e-4 < relative_error(t, want[name]) < 2**-8, name
    exact, _ = once_rounded(cce, replace(case, e=case.e.double(), c=case.c.double(), bias=case.bias.double()))
    for name, t in exact.items():
        assert relative_error(t, want[name]) < 1e-14, name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_cross_entropy(cce, reduction, label_smoothing, weighted):
    case = make_case(
        20,
        9,
        5,
        torch.float64,
        bias=True,
        reduction=reduction,
        label_smoothing=label_smoothing,
        weight=weighted or None,
    )

    def expected(e, c, targets, bias, weight, **options):
        weight = None if weight is None else weight.double()
        return F.cross_entropy(F.linear(e, c, bias), targets, weight, **options)

    want = run(expected, case)
    for name, t in truth(cce, case).items():
        torch.testing.assert_close(t, want[name], rtol=1e-12, atol=1e-12)


def test_reference_derivatives(cce):
    case = make_case((2, 5), 9, 7, torch.float64, bias=True)
    tensors = [t.requires_grad_() for t in (case.e, case.c, case.bias)]
    options = {
        "softcap": 3.0, "temperature": 0.7, "logit_scale": 2.0, "label_smoothing": 0.2, "z_loss": 0.1,
        "weight": torch.rand(9), "token_weight": torch.rand(2, 5), "vocab_size": 8, "shift": True, "return_lse": True,
    }  # fmt: skip
    targets = case.targets.clamp(max=7)
    reference = cce.reference
    assert torch.autograd.gradcheck(
        lambda e, c, b: reference.linear_cross_entropy(e, c, targets, b, **options), tensors
    )
    assert torch.autograd.gradcheck(lambda e, c, b: reference.linear_token_stats(e, c, targets, b)[:3], tensors)


def test_reference_statistics(cce):
    case = make_case((2, 5), 9, 7, torch.float64, bias=True)
    stats = cce.reference.linear_token_stats(case.e, case.c, case.targets, case.bias)
    categorical = torch.distributions.Categorical(logits=F.linear(case.e, case.c, case.bias))
    valid = case.targets != -100
    torch.testing.assert_close(stats.entropy, torch.where(valid, categorical.entropy(), 0))
    torch.testing.assert_close(
        stats.logprob, torch.where(valid, categorical.log_prob(torch.where(valid, case.targets, 0)), 0)
    )
    assert torch.equal(stats.prediction, torch.where(valid, categorical.probs.argmax(-1), -1))
