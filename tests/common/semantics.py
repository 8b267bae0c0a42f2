"""What the loss answers in every case decided once: ignored rows, bad targets, dtypes, shapes, who needs gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from common.layouts import LAYOUTS
from common.poison import poisoned_memory  # noqa: F401
from helpers import DEVICE, DTYPES, IGNORE, INTERPRET, SOME_DTYPES, check, make_case, outputs_of, pick, run

N, V, D = pick((37, 331, 24), (9, 69, 16))
REDUCTIONS = ("mean", "sum", "none")


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_target_ignored(cce, reduction, dtype):
    case = make_case(N, V, D, dtype, bias=True, ignored=2.0, reduction=reduction, return_lse=True)
    case.e.fill_(float("nan"))
    got = run(cce.linear_cross_entropy, case)
    assert got["loss"].shape == (() if reduction != "none" else (N,))
    for name in ("loss", "lse", "de", "dc", "dbias"):
        assert torch.equal(got[name], torch.zeros_like(got[name])), name


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens(cce, shape, reduction):
    got = run(cce.linear_cross_entropy, make_case(shape, V, D, bias=True, reduction=reduction))
    assert got["loss"].shape == (shape if reduction == "none" else ())
    assert got["loss"].sum() == 0
    assert got["de"].shape == (*shape, D)
    assert torch.equal(got["dc"], torch.zeros(V, D, device=DEVICE))
    assert torch.equal(got["dbias"], torch.zeros(V, device=DEVICE))


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("poison", pick([math.nan, math.inf], [math.nan]))
@pytest.mark.parametrize("where", ["scattered", "leading", "trailing", "all but one"])
def test_ignored_rows_are_never_read(cce, where, poison, dtype):
    case = make_case(N, V, D, dtype, bias=True, ignored=0.0, return_lse=True, reduction="sum")
    rows = torch.arange(N)
    ignored = {
        "scattered": rows % 3 == 1,
        "leading": rows < N // 2,
        "trailing": rows >= N // 2,
        "all but one": rows != N // 2,
    }[where].to(DEVICE)
    case.targets[ignored] = IGNORE
    case.e[ignored] = poison
    case.upstream["lse"] = torch.ones(N, device=DEVICE).masked_fill(ignored, math.nan)
    kept = make_case(N, V, D, dtype, bias=True, ignored=0.0, return_lse=True, reduction="sum")
    kept.e, kept.targets = kept.e[~ignored], kept.targets[~ignored]
    kept.upstream["lse"] = case.upstream["lse"][~ignored]

    got, want = run(cce.linear_cross_entropy, case), check(cce, kept)
    assert (got["de"][ignored] == 0).all() and (got["lse"][ignored] == 0).all()
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(got["de"][~ignored], want["de"])
    torch.testing.assert_close(got["dc"], want["dc"])
    torch.testing.assert_close(got["dbias"], want["dbias"])


@pytest.mark.parametrize("ignore_index", pick([-100, -1, 0, 5, V + 7, -(2**31)], [0, V + 7]))
@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
def test_any_ignore_index_and_integer_type(cce, ignore_index, integer):
    case = make_case(N, V, D, bias=True, ignore_index=ignore_index)
    case.targets = case.targets.to(integer)
    check(cce, case)


def test_ignore_index_beyond_32_bits(cce):
    check(cce, make_case(N, V, D, ignore_index=2**40))


@pytest.mark.parametrize("bad", [-1, V, V + 3, -101, 2**33])
@pytest.mark.skipif(DEVICE != "cpu", reason="on CUDA the assertion ends the context")
def test_target_out_of_range(cce, bad):
    case = make_case(N, V, D)
    case.targets[3] = bad
    value = "" if INTERPRET else rf"{bad}\b.*"  # the kernels count bad targets, they do not bring one back
    with pytest.raises(IndexError, match=rf"targets.*{value}\b{V}\b"):
        run(cce.linear_cross_entropy, case)


@pytest.mark.skipif(DEVICE != "cpu", reason="on CUDA the assertion ends the context")
def test_a_padded_class_is_no_target(cce):
    case = make_case(N, V, D, vocab_size=V - 5)
    case.targets[3] = V - 5
    with pytest.raises(IndexError, match=rf"\b{V - 5}\b"):
        run(cce.linear_cross_entropy, case)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_valid_row_keeps_to_itself(cce, value, dtype):
    """As in F.cross_entropy: the row is NaN, and so are the classifier gradients that it takes part in."""
    case = make_case(N, V, D, dtype, reduction="none", ignored=0.0)
    case.e[3, 2] = value
    got = run(cce.linear_cross_entropy, case)
    others = torch.arange(N, device=DEVICE) != 3
    clean = make_case(N, V, D, dtype, reduction="none", ignored=0.0)
    want = run(cce.linear_cross_entropy, clean)
    assert not got["loss"][3].isfinite()
    assert not got["de"][3].isfinite().any()
    torch.testing.assert_close(got["loss"][others], want["loss"][others], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got["de"][others], want["de"][others])
    assert got["dc"].isnan().all(dim=1).any()


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_classes_excluded_by_minus_infinity(cce, dtype):
    """Whole tiles of -inf come before the first finite logit: loss ln(1 + 1/e) and ln(1 + e), no NaN."""
    v, first, second = pick((600, 450, 599), (300, 150, 299))
    e = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
    e[:, 0] = 1
    c = torch.zeros(v, 16, dtype=dtype, device=DEVICE)
    c[first, 0], c[second, 0] = 10, 9
    bias = torch.full((v,), -math.inf, dtype=dtype, device=DEVICE)
    bias[[first, second]] = 0
    for t in (e, c, bias):
        t.requires_grad_()
    targets = torch.tensor([first, second], device=DEVICE)
    loss = cce.linear_cross_entropy(e, c, targets, bias, reduction="none")
    loss.sum().backward()
    want = torch.tensor([math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))], device=DEVICE)
    torch.testing.assert_close(loss.detach(), want, rtol=1e-6, atol=0)
    excluded = torch.ones(v, dtype=torch.bool, device=DEVICE)
    excluded[[first, second]] = False
    assert (c.grad[excluded] == 0).all() and (bias.grad[excluded] == 0).all()
    assert e.grad.isfinite().all() and c.grad.isfinite().all()


def test_an_excluded_target_is_infinitely_improbable(cce):
    """z_y = -inf: the loss is inf, the gradient p - onehot is as finite as in F.cross_entropy."""
    case = make_case(N, V, D, bias=True, ignored=0.0, reduction="none")
    case.bias[case.targets[0]] = -math.inf
    got = run(cce.linear_cross_entropy, case)
    hit = case.targets == case.targets[0]
    assert torch.equal(got["loss"].isinf(), hit)
    assert got["de"].isfinite().all() and got["dc"].isfinite().all()
    want = run(cce.reference.linear_cross_entropy, case, dtype=torch.float64)
    torch.testing.assert_close(got["dc"].double(), want["dc"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_loss_is_fp32(cce, dtype):
    for reduction in REDUCTIONS:
        case = make_case(N, V, D, dtype, reduction=reduction, return_lse=True)
        loss, lse = cce.linear_cross_entropy(case.e, case.c, case.targets, **case.options)
        assert loss.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_reduction_is_that_of_the_whole_batch(cce, reduction, weighted):
    case = make_case((3, N), V, D, bias=True, reduction=reduction, weight=weighted or None)
    got = check(cce, case)["loss"]
    logits = (case.e.double() @ case.c.double().T + case.bias.double()).flatten(0, 1)
    weight = case.options["weight"]
    want = F.cross_entropy(
        logits, case.targets.flatten(), None if weight is None else weight.double(), reduction=reduction
    )
    torch.testing.assert_close(got.double(), want.reshape(got.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", pick([(), (5,), (2, 3), (2, 1, 3), (1, 1)], [(), (2, 1, 3)]))
def test_leading_dimensions(cce, shape):
    check(cce, make_case(shape, V, D, reduction="none", return_lse=True, ignored=0.2))


@pytest.mark.parametrize("v", pick([1, 2, 3, 7, 8, 9, 127, 129, 1001], [1, 2, 8, 33, 65]))
@pytest.mark.parametrize("d", pick([1, 2, 15, 17, 1001], [1, 17, 70]))
def test_awkward_sizes(cce, v, d):
    check(cce, make_case(pick(33, 5), v, d, DTYPES[0], bias=True))


@pytest.mark.parametrize("n", pick([1, 2, 15, 16, 17, 129], [1, 16, 17, 33]))
@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_numbers_of_tokens(cce, n, dtype):
    check(cce, make_case(n, V, D, dtype, bias=True, reduction="sum"))


@pytest.mark.parametrize("reduction", pick(REDUCTIONS, ["none"]))
@pytest.mark.parametrize("length", [0, 1, 2, 9])
@pytest.mark.parametrize("batch", pick([(), (1,), (3,), (2, 2)], [(3,)]))
def test_shift(cce, batch, length, reduction):
    """Position t predicts target t + 1, row by row; the last position of each row gets no gradient."""
    case = make_case((*batch, length), V, D, reduction=reduction, shift=True, return_lse=True, token_weight=True)
    got = check(cce, case)
    assert got["lse"].shape == (*batch, max(length - 1, 0))
    if length:
        assert (got["de"][..., -1, :] == 0).all()


def test_shift_never_crosses_rows(cce):
    case = make_case((3, 7), V, D, shift=True, reduction="none", ignored=0.0)
    got = run(cce.linear_cross_entropy, case)["loss"]
    for row in range(3):
        alone = cce.linear_cross_entropy(case.e[row, :-1], case.c, case.targets[row, 1:], reduction="none")
        torch.testing.assert_close(got[row], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_strides(cce, layout, dtype):
    case = make_case(N, V, D, dtype, bias=True, reduction="none", weight=True, token_weight=True, label_smoothing=0.1)
    want = run(cce.linear_cross_entropy, case)
    for name in ("e", "c", "targets", "bias"):
        setattr(case, name, layout(getattr(case, name)))
    for name in ("weight", "token_weight"):
        case.options[name] = layout(case.options[name])
    got = check(cce, case)
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, msg=lambda m, name=name: f"{name}: {m}")


def test_expanded_inputs(cce):
    """Stride 0: one hidden state for every token, one bias for every class."""
    case = make_case(N, V, D, bias=True)
    case.e, case.bias = case.e[:1].expand(N, D), case.bias[:1].expand(V)
    check(cce, case)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("kind", ["expanded", "every other", "zero", "one row", "negative", "transposed"])
def test_upstream_gradients(cce, kind, dtype):
    case = make_case((4, N), V, D, dtype, reduction="none", return_lse=True)
    draw = torch.randn(4, N, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    upstream = {
        "expanded": torch.full((1, 1), 0.3, device=DEVICE).expand(4, N),
        "every other": draw[..., 0],
        "zero": torch.zeros(4, N, device=DEVICE),
        "one row": torch.zeros(4, N, device=DEVICE).index_fill(1, torch.tensor([2], device=DEVICE), 1.0),
        "negative": -draw[..., 1].abs(),
        "transposed": draw[..., 0].t().contiguous().t(),
    }[kind]
    case.upstream = {"loss": upstream, "lse": upstream.flip(0) if kind != "expanded" else upstream}
    got = check(cce, case)
    if kind == "zero":
        assert (got["de"] == 0).all() and (got["dc"] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_upstream_gradient_stays_in_its_row(cce, bad):
    case = make_case(N, V, D, DTYPES[0], reduction="none", ignored=0.0)
    case.upstream["loss"] = torch.ones(N, device=DEVICE)
    want = run(cce.linear_cross_entropy, case)
    case.upstream["loss"][3] = bad
    got = run(cce.linear_cross_entropy, case)
    others = torch.arange(N, device=DEVICE) != 3
    assert not got["de"][3].isfinite().any()
    torch.testing.assert_close(got["de"][others], want["de"][others])


def test_stride_zero_upstream_of_a_sum(cce):
    """What loss.sum().backward() sends: one number, stride 0."""
    case = make_case((2, N), V, D, reduction="none")
    e = case.e.clone().requires_grad_()
    cce.linear_cross_entropy(e, case.c, case.targets, reduction="none").sum().backward()
    f = case.e.clone().requires_grad_()
    cce.linear_cross_entropy(f, case.c, case.targets, reduction="sum").backward()
    torch.testing.assert_close(e.grad, f.grad)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("needs", [("e",), ("c",), ("bias",), ("e", "c"), ("e", "bias"), ("c", "bias"), ()])
def test_who_needs_gradients(cce, needs, dtype):
    case = make_case(N, V, D, dtype, bias=True, return_lse=True)
    got = check(cce, case, needs=needs)
    assert {name for name in got if name.startswith("d")} == {f"d{name}" for name in needs}


def test_no_grad_and_inference_mode(cce):
    case = make_case(N, V, D, reduction="none")
    want = run(cce.linear_cross_entropy, case)["loss"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            e = case.e.clone().requires_grad_() if mode is torch.no_grad else case.e.clone()
            loss = cce.linear_cross_entropy(e, case.c, case.targets, reduction="none")
        assert not loss.requires_grad
        assert torch.equal(loss, want)


def test_two_calls_give_the_same_bits(cce):
    case = make_case(N, V, D, DTYPES[0], bias=True, reduction="none", return_lse=True)
    first, second = (run(cce.linear_cross_entropy, case) for _ in range(2))
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


def test_arguments_are_left_alone(cce):
    case = make_case(N, V, D, bias=True, weight=True, token_weight=True, shift=True)
    tensors = [case.e, case.c, case.targets, case.bias, case.options["weight"], case.options["token_weight"]]
    before = [t.clone() for t in tensors]
    out = outputs_of(cce.linear_cross_entropy(case.e, case.c, case.targets, case.bias, **case.options))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    assert all(t.untyped_storage().data_ptr() not in storages for t in out.values())
