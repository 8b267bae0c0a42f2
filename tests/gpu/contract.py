"""One call of the kernel, and the numerical contract against float64 it is held to."""

import os
from dataclasses import dataclass

import torch

from benchmarks.truth import LOSS_BOUND, gradient_bound, truth

DEVICE = os.environ.get("CCE_TEST_DEVICE", "cuda")
# Bytes that `single_pass` is measured with at the shapes of the benchmarks.
SINGLE_PASS = {
    name: mib << 20 for name, mib in (("llama3-8b", 1126), ("gemma2-2b", 2304), ("wide", 1792), ("odd", 1792))
}
# The same for as many blocks as dC is summed over in 16 bits, or for less memory than `recompute` needs.
MANY_BLOCKS = {name: mib << 20 for name, mib in (("llama3-8b", 63), ("gemma2-2b", 63), ("wide", 130), ("odd", 172))}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def size(full, dry):
    """A size for the GPU, another for a dry run on a CPU."""
    return full if DEVICE == "cuda" else dry


@dataclass
class Result:
    loss: torch.Tensor
    lse: torch.Tensor | None = None
    de: torch.Tensor | None = None
    dc: torch.Tensor | None = None
    dbias: torch.Tensor | None = None

    def tensors(self):
        return {name: t for name, t in vars(self).items() if t is not None}


def random_inputs(n, v, d, dtype=torch.bfloat16, *, ignored=0.0, seed=0):
    """e, c, targets, bias with logits of standard deviation 3: for sizes too small to look like a trained model."""
    rng = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device=DEVICE)

    targets = torch.randint(v, (n,), generator=rng, device=DEVICE)
    targets[torch.rand(n, generator=rng, device=DEVICE) < ignored] = -100
    c = normal(v, d) * (3 / d**0.5)
    return normal(n, d).to(dtype), c.to(dtype), targets, normal(v).to(dtype)


def random_upstream(shape, seed=1):
    """Both signs, some zeros: what a policy gradient or a loss mask sends back."""
    rng = torch.Generator(device=DEVICE).manual_seed(seed)
    g = torch.randn(shape, generator=rng, device=DEVICE)
    return torch.where(torch.rand(shape, generator=rng, device=DEVICE) < 0.1, 0.0, g)


def run(function, e, c, targets, bias=None, *, upstream=None, upstream_lse=None, frozen=(), **options) -> Result:
    """One forward and backward. Leaves are the given tensors, strides kept; `frozen` names those without gradients."""
    leaves = {"e": e.detach(), "c": c.detach()} | ({} if bias is None else {"bias": bias.detach()})
    for name, t in leaves.items():
        t.requires_grad_(name not in frozen)
    out = function(targets=targets, **leaves, **options)
    loss, lse = out if options.get("return_lse") else (out, None)
    outputs, grads = [loss], [torch.ones_like(loss) if upstream is None else upstream]
    if upstream_lse is not None:
        outputs, grads = [*outputs, lse], [*grads, upstream_lse]
    trained = [name for name in leaves if name not in frozen]
    found = torch.autograd.grad(outputs, [leaves[name] for name in trained], grads) if trained else ()
    gradients = {f"d{name}": g for name, g in zip(trained, found, strict=True)}
    return Result(loss.detach(), None if lse is None else lse.detach(), **gradients)


def check(got: Result, e, c, targets, bias=None, *, upstream=None, upstream_lse=None, **options) -> None:
    """Compare a result with float64: losses and lse to 1e-5, gradients to the relative rule of docs/numerics.md."""
    options = {k: x for k, x in options.items() if k not in ("return_lse", "workspace", "schedule")}
    upstream = 1.0 if upstream is None else upstream
    want = truth(e, c, targets, bias, upstream=upstream, upstream_lse=upstream_lse, once=True, **options)
    scale = want.lse.abs().clamp(min=1)
    if got.loss.ndim == 0:
        scale = scale.sum() if options.get("reduction") == "sum" else (scale.max() if scale.numel() else 1.0)
    assert got.loss.dtype == torch.float32
    assert got.loss.shape == want.reduced.shape
    assert within(got.loss, want.reduced, LOSS_BOUND * scale), f"loss {got.loss}, not {want.reduced}"
    if got.loss.ndim:
        assert not (got.loss < 0).any(), "a per-token loss is negative"
    if got.lse is not None:
        assert got.lse.shape == want.lse.shape
        assert within(got.lse, want.lse, LOSS_BOUND * want.lse.abs().clamp(min=1)), "lse"
    for name, like in (("de", e), ("dc", c), ("dbias", bias)):
        t = getattr(got, name)
        if t is None:
            continue
        assert t.shape == like.shape and t.dtype == like.dtype, f"{name}: {tuple(t.shape)} {t.dtype}"
        assert t.isfinite().all(), f"{name} is not finite"
        ref, once = getattr(want, name), want.once[name]
        err, bound = (t.double() - ref).norm().item(), gradient_bound(ref, once, t.dtype)
        assert err <= bound, f"{name}: error {err:.3e} of {ref.norm().item():.3e}, at most {bound:.3e}"


def within(got, want, tolerance) -> bool:
    return bool(((got.double() - want).abs() <= tolerance).all())


def hold(cce, *inputs, **keywords) -> Result:
    """Run the kernel and check it."""
    got = run(cce.linear_cross_entropy, *inputs, **keywords)
    keywords.pop("frozen", None)
    check(got, *inputs, **keywords)
    return got


def same_bits(a: Result, b: Result) -> None:
    for name, t in a.tensors().items():
        assert torch.equal(t, getattr(b, name)), f"{name} differs between two runs"
