"""Options in every combination and the hard numerical cases, held to the contract of helpers.py."""

import itertools
import math

import pytest
import torch
from common.poison import poisoned_memory  # noqa: F401
from helpers import DEVICE, DTYPES, SOME_DTYPES, check, make_case, once_rounded, pick, relative_error, run, truth

N, V, D = pick((50, 521, 40), (9, 70, 20))
SIXTEEN = [dtype for dtype in DTYPES if dtype.itemsize == 2]

OPTIONS = {
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": 0.37},
    "temperature": {"temperature": 0.7},
    "vocab_size": {"vocab_size": V - 9},
    "weight": {"weight": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "token_weight": {"token_weight": True},
    "num_items": {"num_items": 17},
    "return_lse": {"return_lse": True},
    "shift": {"shift": True},
    "ignore_index": {"ignore_index": 3},
}

PAIRS = list(itertools.combinations(OPTIONS, 2))


def combined(names):
    return {key: value for name in names for key, value in OPTIONS[name].items()}


def reduced(names, reduction):
    """num_items belongs to the mean alone."""
    return combined([name for name in names if reduction == "mean" or name != "num_items"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", pick(["mean", "sum", "none"], ["mean"]))
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(cce, name, reduction, dtype):
    case = make_case((2, N), V, D, dtype, reduction=reduction, **reduced([name], reduction))
    got = check(cce, case)
    if name == "vocab_size":
        assert (got["dc"][V - 9 :] == 0).all()


@pytest.mark.parametrize("pair", PAIRS[:: pick(1, 3)], ids="+".join)
def test_pairs_of_options(cce, pair):
    number = PAIRS.index(pair)
    reduction = ("mean", "sum", "none")[number % 3]
    dtype = DTYPES[number // 3 % len(DTYPES)]
    check(cce, make_case((2, N), V, D, dtype, seed=number, reduction=reduction, **reduced(pair, reduction)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_options_at_once(cce, reduction, dtype):
    case = make_case((2, N), V, D, dtype, reduction=reduction, **reduced(OPTIONS, reduction))
    got = check(cce, case)
    assert (got["dc"][V - 9 :] == 0).all() and (got["dbias"][V - 9 :] == 0).all()


@pytest.mark.parametrize(
    "num_items", [1, 17, 2.5, torch.tensor(17), torch.tensor(2.5), torch.tensor(4, dtype=torch.int32)]
)
def test_num_items_of_every_kind(cce, num_items):
    num_items = num_items.to(DEVICE) if torch.is_tensor(num_items) else num_items
    check(cce, make_case(N, V, D, num_items=num_items, z_loss=1e-3))


@pytest.mark.parametrize(
    "zero",
    [
        {"num_items": 0},
        {"num_items": torch.tensor(0)},
        {"num_items": torch.tensor(0.0)},
        {"weight": 0},
        {"token_weight": 0},
    ],
    ids=["number", "integer tensor", "floating tensor", "weight", "token_weight"],
)
def test_zero_divisor(cce, zero):
    """A mean over nothing is 0, with zero gradients."""
    name, value = next(iter(zero.items()))
    size = {"weight": (V,), "token_weight": (N,)}.get(name)
    option = torch.zeros(size, device=DEVICE) if size else value.to(DEVICE) if torch.is_tensor(value) else value
    got = run(cce.linear_cross_entropy, make_case(N, V, D, bias=True, **{name: option}))
    for key in ("loss", "de", "dc", "dbias"):
        assert (got[key] == 0).all(), key


def test_a_bad_token_weight_of_an_ignored_row_is_not_read(cce):
    case = make_case(N, V, D, token_weight=True, z_loss=0.1)
    want = run(cce.linear_cross_entropy, case)
    case.options["token_weight"][case.targets == -100] = math.nan
    got = run(cce.linear_cross_entropy, case)
    for name, t in want.items():
        assert torch.equal(got[name], t), name


def test_gradient_accumulation(cce):
    """Chunks with num_items add up to the mean of the whole, however unevenly the valid tokens lie."""
    case = make_case(N, V, D, ignored=0.5, label_smoothing=0.1, z_loss=1e-3)
    whole = run(cce.linear_cross_entropy, case)
    items = (case.targets != -100).sum()
    cuts = [0, 3, N // 2, N]
    parts = []
    for a, b in itertools.pairwise(cuts):
        part = make_case(N, V, D, ignored=0.5, label_smoothing=0.1, z_loss=1e-3, num_items=items)
        part.e, part.targets = part.e[a:b], part.targets[a:b]
        parts.append(run(cce.linear_cross_entropy, part))
    torch.testing.assert_close(sum(p["loss"] for p in parts), whole["loss"])
    torch.testing.assert_close(sum(p["dc"] for p in parts), whole["dc"])
    torch.testing.assert_close(torch.cat([p["de"] for p in parts]), whole["de"])


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_a_common_offset_does_not_cancel(cce, dtype):
    """All logits 16384: the loss is log V to 1e-7, where `lse - z` in fp32 has steps of 2^-10."""
    for v in (3, V):
        e = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
        e[:, 0] = 128
        c = torch.zeros(v, 16, dtype=dtype, device=DEVICE)
        c[:, 0] = 128
        loss = cce.linear_cross_entropy(e, c, torch.tensor([0, v - 1], device=DEVICE), reduction="none")
        torch.testing.assert_close(loss.double(), torch.full_like(loss, math.log(v)).double(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("gap", [7, 12, 20])
def test_a_confident_token_keeps_its_gradient(cce, gap, dtype):
    """p = 1 - exp(-gap): the target's p - 1 is an expm1, and dC is equal and opposite in the two classes."""
    e = torch.zeros(4, 16, dtype=dtype, device=DEVICE)
    e[:, 0] = 1
    c = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
    c[0, 0] = gap
    c.requires_grad_()
    cce.linear_cross_entropy(e, c, torch.zeros(4, dtype=torch.long, device=DEVICE), reduction="sum").backward()
    want = -4 / (1 + math.exp(gap))
    quantum = 2.0**-24 if dtype == torch.float16 else 0.0
    tolerance = 1e-5 * abs(want) + torch.finfo(dtype).eps * abs(want) + quantum
    assert abs(c.grad[0, 0].item() - want) <= tolerance
    assert abs(c.grad[1, 0].item() + want) <= tolerance


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_losses_are_never_negative(cce, dtype):
    case = make_case(N, V, D, dtype, spread=60.0, ignored=0.0, reduction="none")
    case.targets = (case.e.double() @ case.c.double().T).argmax(1)
    assert (cce.linear_cross_entropy(case.e, case.c, case.targets, reduction="none") >= 0).all()
    check(cce, case)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_pad_lanes_have_no_mass(cce, sign, dtype):
    """Every logit -6 (or capped to -30 * tanh(100 / 30)): the loss is ln V wherever the target lies."""
    for v in (33, pick(257, 65), pick(1001, 31)):
        e = torch.zeros(3, 16, dtype=dtype, device=DEVICE)
        e[:, 0] = 1
        c = torch.zeros(v, 16, dtype=dtype, device=DEVICE)
        targets = torch.tensor([0, v // 2, v - 1], device=DEVICE)
        for logit, softcap in ((6, None), (100, 30.0)):
            c[:, 0] = sign * logit
            loss = cce.linear_cross_entropy(e, c, targets, reduction="none", softcap=softcap)
            torch.testing.assert_close(loss, torch.full_like(loss, math.log(v)), rtol=1e-6, atol=0)


WAVES = {
    "rising": lambda x: 600 * x - 300,
    "falling": lambda x: 300 - 600 * x,
    "spike at the end": lambda x: torch.where(x == 1, 150.0, -150.0),
    "spike at the start": lambda x: torch.where(x == 0, 150.0, -150.0),
    "far below zero": lambda x: -2000 - 30 * x,
    "far above zero": lambda x: 2000 + 30 * x,
    "nothing before the end": lambda x: torch.where(x < 0.9, -math.inf, 3.0),
    "nothing after the start": lambda x: torch.where(x > 0.1, -math.inf, 3.0),
}


@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_token_stats"])
@pytest.mark.parametrize("wave", WAVES)
def test_a_maximum_that_moves(cce, wave, function):
    """From tile to tile by more than fp32's exponents hold; the targets are among the possible classes."""
    options = {"reduction": "none", "return_lse": True} if function == "linear_cross_entropy" else {}
    case = make_case(pick(60, 12), pick(1500, 170), 16, bias=True, ignored=0.0, spread=1.0, **options)
    case.bias = WAVES[wave](torch.linspace(0, 1, case.c.shape[0], device=DEVICE))
    possible = case.bias.isfinite().nonzero()[:, 0]
    case.targets = possible[case.targets % len(possible)]
    check(cce, case, function)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_softcap_saturates_without_overflow(cce, dtype):
    e = torch.zeros(3, 16, dtype=dtype, device=DEVICE)
    e[:, 0] = torch.tensor([1.0, -1.0, 0.01])
    c = torch.zeros(4, 16, dtype=dtype, device=DEVICE)
    c[:, 0] = torch.tensor([5000.0, -5000.0, 0.0, 100.0])
    case = make_case(3, 4, 16, dtype, reduction="none", softcap=50.0)
    case.e, case.c, case.targets = e, c, torch.tensor([0, 0, 3], device=DEVICE)
    got, want = run(cce.linear_cross_entropy, case), truth(cce, case)
    torch.testing.assert_close(got["loss"].double(), want["loss"], rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got["de"].double(), want["de"], rtol=2 * eps + 1e-5, atol=want["de"].abs().max() * 2 * eps
    )


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_many_tokens_of_one_class(cce, dtype):
    """A 16-bit running sum of dC stops growing: -N / 2 exactly is right."""
    n = pick(4096, 64)
    e = torch.zeros(n, 16, dtype=dtype, device=DEVICE)
    e[:, 0] = 1
    c = torch.zeros(2, 16, dtype=dtype, device=DEVICE, requires_grad=True)
    cce.linear_cross_entropy(e, c, torch.zeros(n, dtype=torch.long, device=DEVICE), reduction="sum").backward()
    assert c.grad[:, 0].tolist() == [-n / 2, n / 2]


def test_loss_scale_of_65536_in_fp16(cce):
    """GradScaler: tiny per-token gradients come out of subnormals, the scaled loss does not overflow."""
    n = pick(4096, 32)
    e = torch.zeros(n, 16, dtype=torch.float16, device=DEVICE)
    e[:, 0] = 1
    c = torch.zeros(2, 16, dtype=torch.float16, device=DEVICE)
    c[0, 0] = 8
    case = make_case(n, 2, 16, torch.float16)
    case.e, case.c, case.targets = e, c, torch.zeros(n, dtype=torch.long, device=DEVICE)
    case.upstream["loss"] = torch.tensor(65536.0, device=DEVICE)
    got = check(cce, case)
    p = 1 / (1 + math.exp(-8))
    assert abs(got["de"][0, 0].item() - 65536 / n * 8 * (p - 1)) < 2e-3 * abs(65536 / n * 8 * (p - 1))
    assert abs(got["dc"][0, 0].item() - 65536 * (p - 1)) < 2e-3 * 65536 * (1 - p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-20, 0, 12])
def test_upstream_gradients_of_any_size(cce, exponent, dtype):
    """The fp16 panel is scaled by a power of two, so that neither end of its range is reached."""
    if dtype == torch.float16 and exponent == 12:
        exponent = 6
    case = make_case(N, V, D, dtype, bias=True, reduction="none", ignored=0.0)
    case.upstream["loss"] = torch.full((N,), 2.0**exponent, device=DEVICE)
    case.upstream["loss"][::2] *= -0.01
    check(cce, case)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_de_keeps_its_accuracy_over_many_panels(cce, dtype):
    """Accumulated in 16 bits, the error of dE would grow with the number of panels."""
    n, v, d = pick((64, 2500, 32), (8, 520, 16))
    case = make_case(n, v, d, dtype, schedule="recompute")
    narrow = case.but(workspace=minimum_workspace(cce, case))
    got = check(cce, narrow)
    want, (model, _) = truth(cce, case), once_rounded(cce, case)
    assert relative_error(got["de"], want["de"]) <= 1.2 * relative_error(model["de"], want["de"]) + 1e-5


def minimum_workspace(cce, case):
    """The smallest budget that a call accepts, as its error message names it."""
    with pytest.raises(ValueError, match="workspace") as error:
        run(cce.linear_cross_entropy, case.but(workspace=1))
    return max(int(word) for word in str(error.value).replace(",", " ").split() if word.isdigit())


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_every_workspace_gives_the_same_answer(cce, dtype):
    case = make_case(N, pick(1500, 520), D, dtype, bias=True, schedule="recompute")
    least = minimum_workspace(cce, case)
    wide = check(cce, case)
    for budget in (least, 2 * least)[: pick(2, 1)]:
        narrow = check(cce, case.but(workspace=budget))
        assert torch.equal(narrow["loss"], wide["loss"])
        torch.testing.assert_close(narrow["dc"], wide["dc"])
    with pytest.raises(ValueError, match=str(least)):
        run(cce.linear_cross_entropy, case.but(workspace=least - 1))
