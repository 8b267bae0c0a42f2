"""Schedule `single_pass` where numbers leave their range: rows that are not finite, logits far from the target's."""

import math

import pytest
import torch
from common.poison import poisoned_memory  # noqa: F401
from common.sweep import (  # noqa: F401
    BOTH,
    DTYPES,
    EVERY,
    MANY,
    NARROW,
    SOME,
    STEP,
    D,
    N,
    V,
    interpreted,
    single,
    some,
    uncounted,
    with_blocks,
)
from helpers import DEVICE, check, relative_error, run, truth


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_valid_row_keeps_to_itself(cce, value, dtype):
    """Its dE is NaN and so is dC; the rows beside it, in its block and in others, are right."""
    case = with_blocks(cce, single(MANY, V, NARROW, dtype, ignored=0.0, reduction="sum"), 2)
    clean = run(cce.linear_cross_entropy, case)["de"]
    case.e[3, 2] = value
    got = run(cce.linear_cross_entropy, case)
    others = torch.arange(MANY, device=DEVICE) != 3
    assert not got["loss"].isfinite() and not got["de"][3].isfinite().any()
    assert relative_error(got["de"][others], clean[others]) <= torch.finfo(dtype).eps
    assert got["dc"].isnan().all(dim=1).any()


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("counted", [True, False])
def test_ignored_rows_are_never_read(cce, counted, dtype, request):
    """Not their hidden states, and not their weights."""
    if not counted:
        request.getfixturevalue("uncounted")
    case = with_blocks(cce, single(MANY, V, NARROW, dtype, ignored=0.4, token_weight=True), 2)
    want = check(cce, case, needs=BOTH)
    ignored = case.targets == -100
    case.e[ignored], case.options["token_weight"][ignored] = math.nan, math.nan
    got = run(cce.linear_cross_entropy, case)
    assert all(torch.equal(got[name], t) for name, t in want.items())


def confident(case):
    """The target 100 nats above the rest."""
    case.bias = torch.zeros(V, device=DEVICE)
    case.bias[5] = 100.0
    case.targets[:] = 5


def improbable(case):
    """The target 100 nats below the largest logit: products with the panel would leave its range."""
    case.bias = torch.zeros(V, device=DEVICE)
    case.bias[case.targets[0]] = -100.0


def towering(case):
    """One class 150 nats above the rest, the target of one row."""
    case.bias = torch.zeros(V, device=DEVICE)
    case.bias[V // 2] = 150.0
    case.targets[1] = V // 2


def excluded(case):
    """-inf for every third class that is no target, whole tiles among them."""
    case.bias = torch.zeros(V, device=DEVICE)
    case.bias[torch.arange(V, device=DEVICE) % 3 == 1] = -math.inf
    case.bias[V // 3 : 2 * V // 3] = -math.inf
    case.bias[case.targets[case.targets >= 0]] = 0.0


def offset(case):
    """All logits 16384 higher."""
    case.bias = torch.full((V,), 16384.0, device=DEVICE)


EXTREMES = {f.__name__: f for f in (confident, improbable, towering, excluded, offset)}


# A softcap leaves neither infinities nor offsets.
CAPPED = ("confident", "improbable", "towering")


@pytest.mark.parametrize(("extreme", "softcap", "dtype"), [
    case for case in some(EXTREMES, (None, 400.0), DTYPES) if case[1] is None or case[0] in CAPPED
])  # fmt: skip
def test_extreme_logits(cce, extreme, softcap, dtype):
    case = single(N, V, D, dtype, ignored=0.0, reduction="sum", softcap=softcap)
    EXTREMES[extreme](case)
    check(cce, case, needs=EVERY)


@pytest.mark.parametrize(("extreme", "z_loss", "dtype"), some(EXTREMES, (1e-4, 1.0), DTYPES))
def test_penalty_on_extreme_logits(cce, extreme, z_loss, dtype):
    case = single(N, V, D, dtype, z_loss=z_loss, token_weight=True)
    EXTREMES[extreme](case)
    check(cce, case, needs=BOTH)


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("extreme", ["improbable", "towering", "excluded"])
@pytest.mark.usefixtures("uncounted")
def test_extreme_logits_beside_ignored_rows(cce, extreme, z_loss, dtype):
    """Rows past the count lie in the block too: a bias alone must not make infinities of them."""
    case = single(MANY, V, NARROW, dtype, ignored=0.0, reduction="sum", z_loss=z_loss)
    EXTREMES[extreme](case)
    case.targets[2::3] = -100
    check(cce, with_blocks(cce, case, 2), needs=BOTH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_a_wide_spread(cce, dtype):
    """Standard deviation 200: nearly every row is one that overflows the panel; in two blocks."""
    check(cce, with_blocks(cce, single(MANY, V, NARROW, dtype, spread=200.0), 2), needs=BOTH)


@pytest.mark.parametrize("dtype", SOME)
def test_one_block_overflows(cce, dtype):
    """The others are as they were: the loss and gradients of both ways of filling a panel add up."""
    case = single(MANY, V, NARROW, dtype, ignored=0.0, reduction="sum")
    case.e[STEP + 3] *= 30
    check(cce, with_blocks(cce, case, 3), needs=BOTH)


def test_an_excluded_target_is_infinitely_improbable(cce):
    """z_y = -inf: the loss is inf, the gradient p - onehot as finite as in F.cross_entropy."""
    case = single(N, V, D, bias=True, ignored=0.0, reduction="sum")
    case.bias[case.targets[0]] = -math.inf
    got, want = run(cce.linear_cross_entropy, case, needs=BOTH), truth(cce, case)
    assert got["loss"].isposinf()
    for name in ("de", "dc"):
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("gap", [7, 20, 60])
def test_a_confident_token_keeps_its_gradient(cce, gap, dtype):
    """p = 1 - exp(-gap): the target's entry of the panel is no difference of two rounded numbers."""
    e = torch.zeros(4, 16, dtype=dtype, device=DEVICE)
    e[:, 0] = 1
    c = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
    c[0, 0] = gap
    c.requires_grad_()
    targets = torch.zeros(4, dtype=torch.long, device=DEVICE)
    cce.linear_cross_entropy(e, c, targets, reduction="sum", schedule="single_pass").backward()
    want = -4 / (1 + math.exp(gap))
    tolerance = (1e-5 + 2 * torch.finfo(dtype).eps) * abs(want)
    assert abs(c.grad[0, 0].item() - want) <= tolerance
    assert abs(c.grad[1, 0].item() + want) <= tolerance
