"""Inputs, runs and the numerical contract, shared by every test.

The same test bodies run in three kinds of process: torch backend on CPU, Triton's interpreter (TRITON_INTERPRET=1) and
a CUDA machine (CCE_TEST_DEVICE=cuda). The interpreter is slow, and wrong on bf16 dot products: hence `DTYPES`, `pick`.

The contract is relative. A kernel that rounds the panel of logit gradients once and each contraction once has some
error; the one under test may have twice that, plus the unit roundoff u of the dtype:

    |err| <= 2 * |err of the once-rounded float64 computation| + u * |reference|      (Frobenius norms)
    per-token losses:  |err| <= 1e-5 * max(1, |lse|)

A 16-bit panel hides the roundings of fp32 arithmetic, an fp32 panel does not. For fp32 inputs, therefore, the
once-rounded computation starts from logits perturbed by 4u of their sum of absolute products, and 16u of the sum of
absolute products of each contraction is allowed on top.
"""

import math
import os
from dataclasses import dataclass, field, replace

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = os.environ.get("CCE_TEST_DEVICE", "cpu")
DTYPES = (torch.float16, torch.float32) if INTERPRET else (torch.bfloat16, torch.float16, torch.float32)
SOME_DTYPES = DTYPES[:1] if INTERPRET else DTYPES
STATS = ("logprob", "lse", "entropy", "prediction", "correct")
# Whose plan the calls of this process follow.
PLANNED_FOR = "cuda" if INTERPRET or DEVICE == "cuda" else "cpu"
IGNORE = -100
LOSS_TOLERANCE = 1e-5
FLOAT64_NOISE = 1e-13  # of the reference, where a gradient is 0 as a difference of equal terms
MODELS = 16

if DEVICE == "cpu":
    torch.set_num_threads(1)  # on tensors this small, threads only wait for each other


def pick(usual, interpreted):
    """A size for the torch and CUDA backends, another for the interpreter."""
    return interpreted if INTERPRET else usual


@dataclass
class Case:
    """One call: tensors, options, and the upstream gradients (random where an output has none)."""

    e: torch.Tensor  # [..., D]
    c: torch.Tensor  # [V, D]
    targets: torch.Tensor  # [...]
    bias: torch.Tensor | None = None  # [V]
    options: dict = field(default_factory=dict)
    upstream: dict = field(default_factory=dict)

    def but(self, **options):
        return replace(self, options=self.options | options)


def make_case(shape, v, d, dtype=torch.float32, *, bias=False, ignored=0.25, spread=3.0, seed=0, **options):
    """Random logits of standard deviation `spread`, a share `ignored` of the targets ignored.

    shape is N or the shape of targets. Options are passed on; `weight=True` and `token_weight=True` are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=generator) * scale).to(DEVICE, dtype)

    classes = options.get("vocab_size") or v
    targets = torch.randint(max(classes, 1), shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < ignored] = options.get("ignore_index", IGNORE)
    case = Case(
        e=normal(*shape, d),
        c=normal(v, d, scale=spread / max(d, 1) ** 0.5),
        targets=targets.to(DEVICE),
        bias=normal(v) if bias else None,
        options=options,
    )
    for name, size in (("weight", (v,)), ("token_weight", shape)):
        if options.get(name) is True:
            options[name] = (torch.rand(size, generator=generator) * 2).to(DEVICE)
    return case


def leaves_of(case, dtype=None, needs=("e", "c", "bias")):
    """Fresh leaves; strides are kept when dtype is None."""
    tensors = {"e": case.e, "c": case.c, "bias": case.bias}
    return {
        name: (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_(name in needs)
        for name, t in tensors.items()
        if t is not None
    }


def outputs_of(result):
    """Name -> tensor, of a loss, a (loss, lse) pair or token statistics."""
    if isinstance(result, torch.Tensor):
        return {"loss": result}
    if hasattr(result, "entropy"):
        return {name: getattr(result, name) for name in STATS}
    return dict(zip(("loss", "lse"), result, strict=True))


def run(function, case, *, dtype=None, needs=("e", "c", "bias")):
    """Outputs, and gradients as "de", "dc", "dbias", of one call under the case's upstream gradients."""
    leaves = leaves_of(case, dtype, needs)
    out = outputs_of(function(targets=case.targets, **leaves, **case.options))
    differentiable = {name: t for name, t in out.items() if t.requires_grad}
    upstream = [
        case.upstream[name].to(t.dtype) if name in case.upstream else draw_upstream(name, t)
        for name, t in differentiable.items()
    ]
    wanted = [t for t in leaves.values() if t.requires_grad]
    grads = iter(torch.autograd.grad(list(differentiable.values()), wanted, upstream) if differentiable else ())
    found = {f"d{name}": next(grads) for name, t in leaves.items() if t.requires_grad and differentiable}
    return {name: t.detach() for name, t in out.items()} | found


def draw_upstream(name, like):
    """Ones for a scalar, else normal numbers that depend on the name and the shape alone."""
    if like.ndim == 0 and name == "loss":
        return torch.ones_like(like)
    generator = torch.Generator().manual_seed(like.numel() + len(name))
    return torch.randn(like.shape, generator=generator).to(like)


def truth(cce, case, function="linear_cross_entropy", dtype=torch.float64):
    options = {k: v for k, v in case.options.items() if k not in ("schedule", "workspace")}
    return run(getattr(cce.reference, function), replace(case, options=options), dtype=dtype)


def check(cce, case, function="linear_cross_entropy", needs=("e", "c", "bias")):
    """Run the kernel and hold every output and gradient to the contract. Returns what the kernel gave."""
    return hold(cce, case, run(getattr(cce, function), case, needs=needs), function)


def hold(cce, case, got, function="linear_cross_entropy"):
    """Hold outputs and gradients of the kernel, on the case's device, to the contract."""
    want = truth(cce, case, function)
    models = [once_rounded(cce, case, function)]
    weights = [t.max().item() for t in map(case.options.get, ("weight", "token_weight")) if t is not None and t.numel()]
    size = math.prod(max(1.0, w) for w in weights)
    for name, t in got.items():
        assert t.shape == want[name].shape, f"{name}: shape {tuple(t.shape)}, not {tuple(want[name].shape)}"
        if name in ("de", "dc", "dbias"):
            assert t.dtype == getattr(case, name[1:]).dtype, f"{name} is {t.dtype}"
            # How far fp32 arithmetic errs is a matter of signs: the worst of several draws is what is unavoidable.
            while t.dtype == torch.float32 and len(models) < MODELS and not within(name, t, want, models):
                models.append(once_rounded(cce, case, function, seed=len(models)))
            assert within(name, t, want, models), describe(name, t, want, models)
        elif t.is_floating_point():
            assert t.dtype == torch.float32, f"{name} is {t.dtype}"
            assert_loss(name, t, want[name], lse_of(cce, case), size)
    if "prediction" in got:
        assert_prediction(cce, case, got, want)
    return got


def within(name, got, want, models):
    """Finite where the dtype reaches, and no further from the truth than twice the worst model, and rounding."""
    representable = want[name].abs() < torch.finfo(got.dtype).max
    err, bound = error_and_bound(name, got, want, models)
    return bool(got.isfinite()[representable].all()) and err <= bound


def error_and_bound(name, got, want, models):
    representable = want[name].abs() < torch.finfo(got.dtype).max
    unavoidable = max((model[name] - want[name])[representable].norm().item() for model, _ in models)
    rounding = torch.finfo(got.dtype).eps / 2 * want[name].norm().item()
    slack = max(slack[name] for _, slack in models)
    return (got.double() - want[name])[representable].norm().item(), 2 * unavoidable + rounding + slack + FLOAT64_NOISE


def describe(name, got, want, models):
    err, bound = error_and_bound(name, got, want, models)
    finite = "" if got.isfinite().all() else ", not finite"
    return f"{name}: error {err:.3e} of {want[name].norm().item():.3e}, allowed {bound:.3e}{finite}"


def assert_loss(name, got, want, lse, size=1.0):
    """1e-5 of the lse, or of the result where options make that larger."""
    scale = want.abs().clamp(min=1)
    if want.ndim:
        scale = torch.maximum(scale, lse.abs())
    elif lse.numel():
        scale = scale.clamp(min=lse.abs().max().item())
    excess = (got.double() - want).abs() / (scale * size)
    assert not (excess > LOSS_TOLERANCE).any(), f"{name}: off by {excess.max().item():.3e} of its scale"
    assert got.isfinite().all() or not want.isfinite().all(), f"{name} is not finite"


def assert_prediction(cce, case, got, want):
    """The predicted id's own log-probability is the largest, up to rounding; ids of ignored rows are -1."""
    ids = got["prediction"]
    targets = case.targets[..., 1:] if case.options.get("shift") else case.targets
    assert torch.equal(ids == -1, want["prediction"] == -1)
    assert torch.equal(got["correct"], (ids == targets) & (ids != -1))

    def logprob(prediction):
        at = torch.full_like(case.targets, IGNORE)
        view = at[..., 1:] if case.options.get("shift") else at
        view.copy_(torch.where(prediction == -1, IGNORE, prediction))
        return truth(cce, replace(case.but(ignore_index=IGNORE), targets=at), "linear_token_stats")["logprob"]

    gap = logprob(want["prediction"]) - logprob(ids)
    assert (gap <= LOSS_TOLERANCE * want["lse"].abs().clamp(min=1)).all(), (
        f"prediction is {gap.max()} below the maximum"
    )


def lse_of(cce, case):
    names = ("ignore_index", "softcap", "shift", "logit_scale", "temperature", "vocab_size")
    options = {k: v for k, v in case.options.items() if k in names}
    leaves = leaves_of(case, torch.float64, needs=())
    return cce.reference.linear_token_stats(targets=case.targets, **leaves, **options).lse


def ignored_rows(case):
    """True at the rows of e that no loss is computed for."""
    ignored = case.targets == case.options.get("ignore_index", IGNORE)
    if case.options.get("shift"):
        ignored = torch.cat((ignored[..., 1:], torch.ones_like(ignored[..., :1])), dim=-1)
    return ignored


def once_rounded(cce, case, function="linear_cross_entropy", seed=0):
    """de, dc, dbias from the float64 panel rounded once to the dtype, each contraction rounded once; the fp32 slack.

    The panel is the reference's gradient with respect to e when the logits stand in for e and the identity for c.
    """
    dtype, v = case.e.dtype, case.c.shape[0]
    e, c = case.e.double().masked_fill(ignored_rows(case)[..., None], 0), case.c.double()
    logits = e @ c.T
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(seed)
        sign = torch.randint(2, logits.shape, generator=generator).to(logits) * 2 - 1
        size = e.abs() @ c.abs().T + (0 if case.bias is None else case.bias.double().abs().nan_to_num(posinf=0))
        logits = logits + 4 * 2**-24 * size * sign
    eye = torch.eye(v, dtype=torch.float64, device=c.device)
    panel = truth(cce, replace(case, e=logits, c=eye), function)["de"].reshape(-1, v)
    if dtype == torch.float16:
        at_zero = truth(cce, replace(case, e=torch.zeros_like(logits), c=eye, bias=None), function)["de"]
        largest = max((t.abs().max().item() for t in (panel, at_zero) if t.numel()), default=0.0)
        scale = 2.0 ** (torch.tensor(largest or 1.0).log2().ceil().item() - 10)
        panel = (panel / scale).to(dtype).double() * scale
    else:
        panel = panel.to(dtype).double()

    def contractions(panel, e, c):
        rows = e.reshape(-1, e.shape[-1])
        return {"de": (panel @ c).reshape(e.shape), "dc": panel.T @ rows, "dbias": panel.sum(0)}

    model = {name: t.to(dtype).double() for name, t in contractions(panel, e, c).items()}
    sizes = contractions(panel.abs() * (dtype == torch.float32), e.abs(), c.abs())
    if function == "linear_token_stats":  # the entropy's gradient, p (log p + H), cancels where all p are equal
        upstream = case.upstream.get("entropy")
        largest = 4.0 if upstream is None or upstream.numel() == 0 else upstream.abs().amax().item()
        terms = contractions(torch.full_like(panel, 2 * math.log(v) / v * largest), e.abs(), c.abs())
        sizes = {name: t + terms[name] for name, t in sizes.items()}
    return model, {name: 16 * 2**-24 * t.norm().item() for name, t in sizes.items()}


def relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()
