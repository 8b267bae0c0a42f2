"""Strides, alignment and upstream layouts; which gradients are wanted; autocast."""

import pytest
import torch

from benchmarks.states import make

from .contract import DEVICE, check, hold, random_inputs, random_upstream, run, same_bits, size

N, V, D = size((300, 1021, 128), (60, 331, 64))


def transposed(t):
    return t.T.contiguous().T


def every_second_row(t):
    return torch.stack([t, torch.full_like(t, torch.nan)], 1).flatten(0, 1)[::2]


def every_second_column(t):
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(1)[:, ::2]


def inside_wider_rows(t):
    return torch.cat([t, torch.full_like(t[:, :8], torch.nan)], 1)[:, : t.shape[1]]


def off_alignment(t):
    """The same rows from an address that is a multiple of 2 bytes only: no descriptor can address it."""
    flat = t.new_empty(t.numel() + 1)
    flat[1:] = t.flatten()
    return flat[1:].view_as(t)


def reversed_rows(t):
    return t.flip(0).contiguous().flip(0)


LAYOUTS = [transposed, every_second_row, every_second_column, inside_wider_rows, off_alignment, reversed_rows]


@pytest.mark.parametrize("side", ["e", "c", "both"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_strides_of_inputs(cce, layout, side):
    e, c, targets, bias = random_inputs(N, V, D, ignored=0.1)
    plain = hold(cce, e, c, targets, bias)
    e = layout(e) if side in ("e", "both") else e
    c = layout(c) if side in ("c", "both") else c
    got = hold(cce, e, c, targets, bias)
    assert torch.allclose(got.loss, plain.loss, rtol=1e-5)


def test_expanded_rows(cce):
    """Every token the same hidden state, stride 0; one class of c repeated by stride 0."""
    e, c, targets, _ = random_inputs(N, V, D)
    hold(cce, e[:1].expand(N, D), c, targets)
    hold(cce, e, c[:1].expand(V, D), targets)


def test_strides_of_targets_and_bias(cce):
    e, c, targets, bias = random_inputs(N, V, D, ignored=0.1)
    strided_targets = torch.stack([targets, torch.full_like(targets, 10**9)], 1)[:, 0]
    strided_bias = torch.stack([bias, torch.full_like(bias, torch.nan)], 1)[:, 0]
    same_bits(hold(cce, e, c, strided_targets, strided_bias), hold(cce, e, c, targets, bias))


@pytest.mark.parametrize("layout", ["stride-0", "stride-2", "transposed", "negative-values"])
def test_strides_of_upstream(cce, layout):
    e, c, targets, bias = random_inputs(N, V, D, ignored=0.1)
    e, targets = e.reshape(2, N // 2, D), targets.reshape(2, N // 2)
    g = random_upstream(targets.shape)
    upstream = {
        "stride-0": g[:1, :1].expand_as(g) - 2.0,
        "stride-2": torch.stack([g, torch.full_like(g, torch.nan)], -1)[..., 0],
        "transposed": g.T.contiguous().T,
        "negative-values": -g.abs(),
    }[layout]
    hold(cce, e, c, targets, bias, reduction="none", return_lse=True, upstream=upstream, upstream_lse=upstream.flip(1))


def test_sum_of_per_token_losses_backpropagates(cce):
    """`loss.sum().backward()` sends a gradient of stride 0; `loss[::2]` sends one with holes."""
    e, c, targets, _ = random_inputs(N, V, D)
    for pick in (slice(None), slice(None, None, 2)):
        leaf = e.detach().requires_grad_()
        cce.linear_cross_entropy(leaf, c, targets, reduction="none")[pick].sum().backward()
        weight = torch.zeros(N, device=DEVICE)
        weight[pick] = 1
        want = run(cce.linear_cross_entropy, e, c, targets, reduction="none", upstream=weight)
        assert torch.equal(leaf.grad, want.de)


@pytest.mark.parametrize("frozen", [("c", "bias"), ("e",), ("e", "bias"), ("bias",), ("e", "c")], ids="+".join)
def test_frozen_sides(cce, frozen):
    e, c, targets, bias = random_inputs(N, V, D, ignored=0.3)
    got = hold(cce, e, c, targets, bias, frozen=frozen)
    assert set(got.tensors()) == {"loss"} | {f"d{x}" for x in ("e", "c", "bias") if x not in frozen}


@pytest.mark.cuda_only  # on a CPU `recompute`, which runs without gradients, sums in another order
def test_no_grad_and_inference_mode(cce):
    e, c, targets, bias = random_inputs(N, V, D, ignored=0.1)
    want = run(cce.linear_cross_entropy, e, c, targets, bias).loss
    leaf = e.detach().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = cce.linear_cross_entropy(leaf, c, targets, bias)
        assert torch.equal(got, want) and not got.requires_grad


def test_second_backward(cce):
    e, c, targets, _ = random_inputs(N, V, D, ignored=0.1)
    e.requires_grad_(), c.requires_grad_()
    loss = cce.linear_cross_entropy(e, c, targets)
    first = torch.autograd.grad(loss, (e, c), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (e, c), 2 * torch.ones_like(loss))
    assert all(torch.equal(g, k) for g, k in zip(first, kept, strict=True)), "earlier gradients were overwritten"
    assert all(torch.equal(g, 2 * k) for g, k in zip(second, kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(cce, dtype):
    """fp32 weights and states are cast as F.linear casts them; gradients return in fp32."""
    e, c, targets, _ = random_inputs(N, V, D, torch.float32)
    with torch.autocast(DEVICE, dtype):
        got = run(cce.linear_cross_entropy, e, c, targets)
    assert got.de.dtype == got.dc.dtype == torch.float32
    got.de, got.dc = got.de.to(dtype), got.dc.to(dtype)
    check(got, e.to(dtype), c.to(dtype), targets)


def test_descriptors_and_pointers_agree(cce):
    """The same numbers at aligned and unaligned addresses take the two ways of reading, with one result in fp32."""
    n, v, d = size((1000, 5000, 512), (100, 500, 64))
    s = make(n, v, d, torch.bfloat16, DEVICE)
    got = hold(cce, s.e, s.c, s.targets, reduction="none")
    other = hold(cce, off_alignment(s.e), off_alignment(s.c), s.targets, reduction="none")
    assert (got.loss - other.loss).abs().max() <= 2e-5
