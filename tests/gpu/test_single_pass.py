"""Schedule `single_pass`: blocks of tokens, rows past the count, logits out of range, the same bits, graphs."""

import pytest
import torch

from benchmarks.states import make
from benchmarks.timing import captured

from .contract import DEVICE, DTYPES, Result, check, hold, run, same_bits, size

N, V, D = size((1500, 4001, 192), (510, 1401, 64))
CAPPED = {"softcap": 20.0, "logit_scale": 1.3, "reduction": "sum"}
SINGLE = {"schedule": "single_pass", "frozen": ("bias",)}


@pytest.fixture(autouse=True)
def by_its_own_kernels(cce):
    """What is asked for is what runs: the kernel that no other schedule launches was launched."""
    launches = cce.backends.triton_backend.launches if DEVICE == "cuda" else {}
    before = launches.get("factor_kernel", 0)
    yield
    assert DEVICE != "cuda" or launches["factor_kernel"] > before


@pytest.fixture(params=["count awaited", "all rows"])
def counting(request, cce, monkeypatch):
    """Problems as small as these take all rows unless the threshold is moved."""
    if request.param == "count awaited" and DEVICE == "cuda":
        monkeypatch.setattr(cce.backends.triton_backend.configs, "SMALL", 0)


def budget(cce, dtype, blocks, n=N, v=V, d=D):
    """The smallest workspace for which the plan has so many blocks of tokens; 0 blocks: the smallest of all."""

    def made(workspace):
        try:
            sizes = {"device": DEVICE, "workspace": workspace, "schedule": "single_pass", "scalar": True}
            return cce.plan(n, v, d, dtype, **sizes).blocks
        except ValueError:
            return n + 1

    low, high = 0, 1 << 32
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if made(middle) <= (blocks or n) else (middle + 1, high)
    assert blocks in (0, made(low)), f"{made(low)} blocks, not {blocks}, in {low} bytes"
    return low


@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("blocks", [1, 2, 0])
def test_blocks_and_ignored_rows(cce, counting, blocks, ignored):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=ignored)
    got = hold(cce, s.e, s.c, s.targets, workspace=budget(cce, torch.bfloat16, blocks), **SINGLE)
    assert not got.de[s.targets == -100].any()
    if ignored == 1:
        assert got.loss == 0 and not got.dc.any()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("blocks", [1, 0])
def test_bias_softcap_and_scale(cce, counting, blocks, dtype):
    s = make(N, V, D, DTYPES[dtype], DEVICE, ignored=0.1)
    upstream = torch.tensor(-1.7, device=DEVICE)
    workspace = budget(cce, DTYPES[dtype], blocks)
    hold(cce, s.e, s.c, s.targets, s.bias, workspace=workspace, upstream=upstream, **CAPPED, **SINGLE)


@pytest.mark.parametrize("frozen", ["e", "c"])
def test_a_frozen_side(cce, frozen):
    s = make(N, V, D, torch.bfloat16, DEVICE)
    workspace = budget(cce, torch.bfloat16, 2)
    got = hold(cce, s.e, s.c, s.targets, workspace=workspace, schedule="single_pass", frozen=(frozen,))
    assert getattr(got, f"d{frozen}") is None


def test_a_large_odd_vocabulary_without_descriptors(cce):
    """The last V mod 8 columns are products of their own; no row but the first is 16-byte aligned."""
    n, v, d = size((384, 176245, 253), (60, 1245, 61))
    s = make(n, v, d, torch.bfloat16, DEVICE, ignored=0.1)
    for blocks in (1, 0):
        hold(cce, s.e, s.c, s.targets, workspace=budget(cce, torch.bfloat16, blocks, n, v, d), **SINGLE)


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("where", ["one class of all rows", "the target of some rows"])
def test_logits_out_of_range(cce, counting, where, ignored):
    """150 nats above the target: the block is filled a second time, rows past the count in it or not."""
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=ignored)
    bias = torch.zeros(V, device=DEVICE, dtype=torch.bfloat16)
    if where == "one class of all rows":
        bias[V // 2] = 150.0
    else:
        bias[s.targets[s.targets >= 0][0]] = -150.0
    hold(cce, s.e, s.c, s.targets, bias, workspace=budget(cce, torch.bfloat16, 4), **SINGLE)


def test_weights_divisor_and_shift(cce):
    """Against the same call in the other schedule: what multiplies a row is as if its upstream gradient did."""
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=0.3)
    e, targets = s.e.reshape(3, N // 3, D), s.targets.reshape(3, N // 3)
    rng = torch.Generator().manual_seed(0)
    weight, token_weight = (torch.rand(*shape, generator=rng).to(DEVICE) for shape in ((V,), targets.shape))
    options = {"weight": weight, "token_weight": token_weight, "num_items": torch.tensor(517.0, device=DEVICE)}
    options |= {"shift": True, "temperature": 0.7, "vocab_size": V - 3}
    targets[targets >= V - 3] = 0
    one, other = (
        run(cce.linear_cross_entropy, e, s.c, targets, **options, schedule=schedule)
        for schedule in ("single_pass", "recompute")
    )
    assert torch.allclose(one.loss, other.loss, rtol=1e-6)
    for name in ("de", "dc"):
        a, b = getattr(one, name).float(), getattr(other, name).float()
        assert (a - b).norm() <= 7e-3 * b.norm(), name
    assert not one.dc[-3:].any() and not one.de[:, -1].any()


def test_ten_runs_and_a_second_backward_give_the_same_bits(cce):
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=0.3)
    options = {"workspace": budget(cce, torch.bfloat16, 2), "schedule": "single_pass"}
    first = run(cce.linear_cross_entropy, s.e, s.c, s.targets, **options)
    for _ in range(9):
        same_bits(first, run(cce.linear_cross_entropy, s.e, s.c, s.targets, **options))
    e, c = s.e.clone().requires_grad_(), s.c.clone().requires_grad_()
    loss = cce.linear_cross_entropy(e, c, s.targets, **options)
    for keep in (True, True, False):
        de, dc = torch.autograd.grad(loss, (e, c), retain_graph=keep)
        same_bits(first, Result(loss.detach(), de=de, dc=dc))


@pytest.mark.cuda_only
def test_graph_capture_and_replay(cce):
    """Forward and backward in one CUDA graph of two blocks; other states, targets and ignored rows in each replay."""
    s = make(N, V, D, ignored=0.3)
    e, c, targets = s.e.clone().requires_grad_(), s.c.clone().requires_grad_(), s.targets.clone()
    upstream = torch.tensor(3.0, device=DEVICE)
    workspace = budget(cce, torch.bfloat16, 2)

    def step():
        loss = cce.linear_cross_entropy(e, c, targets, schedule="single_pass", workspace=workspace)
        return loss, *torch.autograd.grad(loss, (e, c), upstream)

    replay, (loss, de, dc) = captured(step)
    for seed, ignored in ((0, 0.3), (1, 0.0), (2, 0.9), (3, 1.0)):
        new = make(N, V, D, ignored=ignored, seed=seed)
        with torch.no_grad():
            e.copy_(new.e), c.copy_(new.c), targets.copy_(new.targets)
        replay()
        check(Result(loss.detach(), de=de, dc=dc), new.e, new.c, new.targets, upstream=upstream)
        assert not de[new.targets == -100].any()


@pytest.mark.parametrize("g", [65536.0, 0.0, float("nan"), float("inf")])
def test_upstream_gradients(cce, g):
    """Of the loss as a whole: what is 0 stays 0, so ignored rows do whatever arrives."""
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=0.3)
    upstream, ignored = torch.tensor(g, device=DEVICE), s.targets == -100
    got = run(cce.linear_cross_entropy, s.e, s.c, s.targets, upstream=upstream, schedule="single_pass")
    assert not got.de[ignored].any()
    if g == g and g < float("inf"):
        check(got, s.e, s.c, s.targets, upstream=upstream)
    else:
        assert not got.de[~ignored].isfinite().any()
