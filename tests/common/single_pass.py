"""Schedule `single_pass`: loss and both gradients in one sweep, held to the same contract as everything else."""

import math

import pytest
import torch
from common.draws import least_workspace
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
from helpers import DEVICE, INTERPRET, PLANNED_FOR, check, make_case, pick, run
from torch.utils.checkpoint import checkpoint

IGNORED = ("none", "scattered", "most", "a whole block", "all")


@pytest.mark.parametrize(("blocks", "ignored", "dtype"), some((1, 2, 3), IGNORED, DTYPES))
def test_blocks_of_tokens(cce, blocks, ignored, dtype):
    """Whatever the number of blocks, and however few of them valid rows fill."""
    case = single(MANY, V, NARROW, dtype, ignored=0.0)
    rows = torch.arange(MANY, device=DEVICE)
    case.targets[
        {
            "none": rows < 0,
            "scattered": rows % 3 == 1,
            "most": rows % 7 != 2,
            "a whole block": (rows >= STEP) & (rows < 2 * STEP),
            "all": rows >= 0,
        }[ignored]
    ] = -100
    case = with_blocks(cce, case, blocks)
    got = check(cce, case, needs=BOTH)
    assert (got["de"][case.targets == -100] == 0).all()
    if ignored == "all":
        assert got["loss"] == 0 and not got["dc"].any()


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.8])
def test_several_splits_in_several_blocks(cce, ignored, dtype):
    """The first block is folded before its count is known, and the vocabulary is cut by the count."""
    case = single(MANY, pick(2500, 300), NARROW, dtype, ignored=ignored)
    check(cce, with_blocks(cce, case, 3), needs=BOTH)


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("weights", [{}, {"token_weight": True, "weight": True}], ids=["plain", "weighted"])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.usefixtures("uncounted")
def test_count_that_nobody_waits_for(cce, ignored, weights, dtype):
    case = single(MANY, V, NARROW, dtype, ignored=ignored, bias=True, **weights)
    case = with_blocks(cce, case, 2)
    got = check(cce, case, needs=BOTH)
    assert (got["de"][case.targets == -100] == 0).all()


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRET, reason="the torch backend knows the count")
@pytest.mark.parametrize("ignore_index", [V + 5, -(2**31), 2**31, 2**40])
@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
@pytest.mark.usefixtures("uncounted")
def test_ignore_index_of_rows_past_the_count(cce, ignore_index, integer):
    """They are marked as ignored, also where the integer type of the targets has no such number."""
    case = single(N, V, D, ignored=0.0, ignore_index=ignore_index)
    if -(2**31) <= ignore_index < 2**31 or integer == torch.int64:
        case.targets[::2] = ignore_index
    case.targets = case.targets.to(integer)
    check(cce, case, needs=BOTH)


@pytest.mark.parametrize("v", pick([1, 2, 7, 8, 129, 1001, 2500], [1, 2, 33]))
@pytest.mark.parametrize("d", pick([1, 2, 17, 1001], [1, 17]))
def test_awkward_sizes(cce, v, d):
    check(cce, single(pick(33, 5), v, d, DTYPES[0]), needs=BOTH)


@pytest.mark.parametrize("n", pick([1, 2, 127, 128, 129, 257], [1, 2, 16, 33]))
@pytest.mark.parametrize("dtype", SOME)
def test_numbers_of_tokens(cce, n, dtype):
    case = single(n, V, D, dtype, reduction="sum")
    check(cce, case.but(workspace=least_workspace(cce, case, BOTH)), needs=BOTH)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(cce, shape):
    got = run(cce.linear_cross_entropy, single(shape, V, D))
    assert got["loss"] == 0 and got["de"].shape == (*shape, D) and not got["dc"].any()


@pytest.mark.parametrize("blocks", pick([2], [2, 6]))
def test_frequent_ids(cce, blocks):
    """dC in 16 bits, but for the rows of the most frequent targets; the terms of the others are added at the end."""
    n = pick(MANY, 16 * blocks - 3)
    case = single(n, pick(2500, V), D, torch.bfloat16, ignored=0.1)
    case.targets[(case.targets >= 0) & (torch.arange(n, device=DEVICE) % 2 == 0)] = V - 1
    check(cce, with_blocks(cce, case, blocks, rounded=True), needs=BOTH)


@pytest.mark.parametrize("needs", BOTH)
@pytest.mark.parametrize("dtype", SOME)
def test_a_frozen_side(cce, needs, dtype):
    case = with_blocks(cce, single(MANY, V, NARROW, dtype, softcap=5.0, bias=True), 3)
    got = check(cce, case, needs=(needs,))
    assert {name for name in got if name.startswith("d")} == {f"d{needs}"}


@pytest.mark.parametrize(("upstream", "dtype"), some((1.0, -2.5, 1 / 3, 65536.0, 1e-6, 0.0, -0.0), DTYPES))
def test_upstream_gradients(cce, upstream, dtype):
    case = single(N, V, D, dtype)
    case.upstream["loss"] = torch.tensor(upstream, device=DEVICE)
    got = check(cce, case, needs=BOTH)
    assert (got["de"][case.targets == -100] == 0).all()
    if upstream == 0:
        assert not got["de"].any() and not got["dc"].any()


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("upstream", [math.nan, math.inf, -math.inf])
def test_upstream_gradients_that_are_not_finite(cce, upstream, dtype):
    """They reach every valid row, and no ignored one."""
    case = single(N, V, D, dtype, vocab_size=V - 9)
    case.upstream["loss"] = torch.tensor(upstream, device=DEVICE)
    got = run(cce.linear_cross_entropy, case, needs=BOTH)
    ignored = case.targets == -100
    assert (got["de"][ignored] == 0).all() and (got["dc"][V - 9 :] == 0).all()
    assert not got["de"][~ignored].isfinite().any() and not got["dc"][: V - 9].isfinite().any()


def test_zero_divisors(cce):
    """A mean over nothing is 0, with zero gradients."""
    zeros = [{"num_items": x} for x in (0, torch.tensor(0), torch.tensor(0.0))]
    zeros += [{"weight": torch.zeros(V)}, {"token_weight": torch.zeros(N)}]
    for option in zeros[:: pick(1, 2)]:
        option = {k: x.to(DEVICE) if torch.is_tensor(x) else x for k, x in option.items()}
        got = run(cce.linear_cross_entropy, single(N, V, D, **option))
        assert not any(got[name].any() for name in ("loss", "de", "dc")), option


@pytest.mark.parametrize("dtype", SOME)
def test_retain_graph(cce, dtype):
    """The first backward hands out its gradients; a second makes the same ones anew and leaves the first's alone."""
    case = with_blocks(cce, single(MANY, V, NARROW, dtype, bias=True, z_loss=1e-2), 2, EVERY)
    e, c, bias = leaves = [t.clone().requires_grad_() for t in (case.e, case.c, case.bias)]
    loss = cce.linear_cross_entropy(e, c, case.targets, bias, **case.options)
    half, one = (torch.tensor(x, device=DEVICE) for x in (0.5, 1.0))
    first = torch.autograd.grad(loss, leaves, half, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(loss, leaves, one, retain_graph=True)
    third = torch.autograd.grad(loss, leaves, half)
    for i in range(3):
        assert torch.equal(first[i], kept[i]) and torch.equal(first[i], third[i])
        assert torch.equal(first[i], second[i] / 2)
        assert len({t[i].untyped_storage().data_ptr() for t in (first, second, third)}) == 3
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, e)


def test_second_derivatives_are_refused(cce):
    """Also after a first backward without a graph, whose gradients are then made anew."""
    for backward_first in (False, True):
        case = single(N, V, D)
        e, c = (t.clone().requires_grad_() for t in (case.e, case.c))
        loss = cce.linear_cross_entropy(e, c, case.targets, schedule="single_pass")
        if backward_first:
            plain = torch.autograd.grad(loss, (e, c), retain_graph=True)
        first = torch.autograd.grad(loss, (e, c), create_graph=True)
        assert not backward_first or all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))
        for gradient in first:
            assert gradient.requires_grad
            with pytest.raises((NotImplementedError, RuntimeError), match="second|twice|double"):
                gradient.square().sum().backward(retain_graph=True)


def test_without_gradients_it_is_the_fold(cce):
    case = make_case(N, V, D)
    losses = [
        cce.linear_cross_entropy(case.e, case.c, case.targets, schedule=schedule)
        for schedule in ("single_pass", "recompute", "auto")
    ]
    e = case.e.clone().requires_grad_()
    with torch.no_grad():
        losses.append(cce.linear_cross_entropy(e, case.c, case.targets, schedule="single_pass"))
    assert all(torch.equal(loss, losses[0]) and not loss.requires_grad for loss in losses)


def test_auto_is_one_of_the_two(cce):
    case = make_case(N, V, D)
    auto, one, other = (
        run(cce.linear_cross_entropy, case.but(schedule=schedule)) for schedule in ("auto", "single_pass", "recompute")
    )
    plan = cce.plan(N, V, D, torch.float32, device=PLANNED_FOR, scalar=True)
    chosen = one if plan.schedule == "single_pass" else other
    assert all(torch.equal(auto[name], t) for name, t in chosen.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(cce, reentrant):
    case = single((2, N), V, D)
    x = torch.randn(2, N, D, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    layer = torch.nn.Linear(D, D, device=DEVICE)
    c = case.c.clone().requires_grad_()

    def loss(x, c):
        return cce.linear_cross_entropy(layer(x).tanh(), c, case.targets, schedule="single_pass")

    plain = torch.autograd.grad(loss(x, c), [x, c, *layer.parameters()])
    layer.zero_grad()
    checkpoint(loss, x, c, use_reentrant=reentrant).backward()
    for got, want in zip((x.grad, c.grad, *(p.grad for p in layer.parameters())), plain, strict=True):
        torch.testing.assert_close(got, want)


def test_autocast(cce):
    """fp32 masters, bf16 products, gradients in fp32; fp16 is refused by name and served without it."""
    case = single(N, V, D)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = run(cce.linear_cross_entropy, case)
    cast = single(N, V, D)
    cast.e, cast.c = case.e.bfloat16(), case.c.bfloat16()
    want = check(cce, cast)
    for name in ("de", "dc"):
        assert got[name].dtype == torch.float32 and torch.equal(got[name], want[name].float())
    with torch.autocast(DEVICE, dtype=torch.float16):
        with pytest.raises(ValueError, match="single_pass.*float16"):
            run(cce.linear_cross_entropy, case)
        run(cce.linear_cross_entropy, case.but(schedule="auto"))


def test_grad_scaler(cce):
    """A scale of 65536 changes no bit of a step; an overflow is found."""
    case = single(N, V, D)
    weight = torch.nn.Parameter(case.c.clone())
    scaler = torch.amp.GradScaler(DEVICE, init_scale=65536.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def backward(factor):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = cce.linear_cross_entropy(case.e, weight, case.targets, schedule="single_pass")
        scaler.scale(loss * factor).backward()

    backward(1.0)
    scaler.unscale_(optimizer)
    case.e, case.c = case.e.bfloat16(), case.c.bfloat16()
    assert torch.equal(weight.grad, run(cce.linear_cross_entropy, case)["dc"].float())
    scaler.step(optimizer)
    scaler.update()
    before = weight.detach().clone()
    backward(1e38)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), before) and scaler.get_scale() < 65536.0


REFUSED = {
    "reduction='none'": {"reduction": "none"},
    "return_lse": {"return_lse": True},
    "label_smoothing": {"label_smoothing": 0.1, "softcap": 5.0},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_serve_is_refused_by_name(cce, name):
    """Asked for; left to choose, the other schedule serves it."""
    case = single(N, V, D, **REFUSED[name])
    with pytest.raises(ValueError, match=rf"schedule.*single_pass.*{name}.*recompute"):
        run(cce.linear_cross_entropy, case)
    auto, other = (run(cce.linear_cross_entropy, case.but(schedule=s)) for s in ("auto", "recompute"))
    assert all(torch.equal(auto[key], t) for key, t in other.items())


def test_several_refusals_are_named_together(cce):
    case = single(N, V, D, reduction="none", label_smoothing=0.6)
    with pytest.raises(ValueError, match=r"reduction='none', label_smoothing"):
        run(cce.linear_cross_entropy, case)


@pytest.mark.parametrize("dtype", SOME)
def test_too_small_a_workspace_names_the_minimum(cce, dtype):
    case = single(MANY, V, NARROW, dtype)
    least = least_workspace(cce, case, BOTH)
    run(cce.linear_cross_entropy, case.but(workspace=least))
    with pytest.raises(ValueError, match=rf"workspace.*\b{least}\b"):
        run(cce.linear_cross_entropy, case.but(workspace=least - 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_give_the_same_bits(cce, dtype):
    case = with_blocks(cce, single(MANY, V, NARROW, dtype, softcap=5.0, token_weight=True), 2)
    first, second = (run(cce.linear_cross_entropy, case, needs=BOTH) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    try:
        third = run(cce.linear_cross_entropy, case, needs=BOTH)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(t, second[name]) and torch.equal(t, third[name]) for name, t in first.items())
