"""What both kinds of fuzz draw from: excluded classes, upstream gradients of every layout, the least workspace."""

import math

import torch
from helpers import PLANNED_FOR

from tools import memory

UPSTREAMS = ("dense", "stride 0", "sparse", "zero")


def exclude_some_classes(case):
    """-inf for every third class that is no target."""
    excluded = torch.arange(case.bias.numel(), device=case.bias.device) % 3 == 1
    excluded[case.targets[(case.targets >= 0) & (case.targets < excluded.numel())].long()] = False
    excluded[(case.options.get("vocab_size") or excluded.numel()) - 1] = False
    case.bias[excluded] = -math.inf


def set_upstream(case, size, seed, kind_of):
    """Scalars of any size; per-token gradients of the kind that `kind_of()` gives for each output."""
    device, shape = case.e.device, list(case.targets.shape)
    if case.options["shift"] and shape[-1]:
        shape[-1] -= 1
    generator = torch.Generator().manual_seed(seed)
    reduced = case.options.get("reduction") in ("mean", "sum")
    for name in ("loss", "logprob", "lse", "entropy"):
        if name == "loss" and reduced:
            case.upstream[name] = torch.tensor(size, device=device)
            continue
        dense = (torch.randn(*shape, 2, generator=generator) * size).to(device)
        case.upstream[name] = {
            "dense": dense[..., 0],
            "stride 0": torch.tensor(size, device=device).expand(shape),
            "sparse": dense[..., 1] * (dense[..., 0].abs() > 1.5 * abs(size)),
            "zero": torch.zeros(shape, device=device),
        }[kind_of()]


def servable(case, needs):
    """Whether `single_pass` serves this call of the loss."""
    options = case.options
    scalar = options.get("reduction", "mean" if "schedule" in options else "none") != "none"
    eps, v = options.get("label_smoothing", 0.0), options.get("vocab_size") or case.c.shape[0]
    smoothed = eps > 0 and (options.get("softcap") is not None or eps > 0.5 or v < 64)
    return (
        scalar
        and not options.get("return_lse")
        and not smoothed
        and case.e.dtype != torch.float16
        and not {"e", "c"}.isdisjoint(needs)
    )


def least_workspace(cce, case, needs, device=PLANNED_FOR):
    """The planner's minimum for this call."""
    n, v = case.targets.numel(), case.options.get("vocab_size") or case.c.shape[0]
    sizes = {f"need_d{name}": name in needs for name in ("e", "c")}
    sizes["need_dbias"] = "bias" in needs and case.bias is not None
    schedule = case.options.get("schedule", "auto") if n else "recompute"
    sizes |= {"device": device, "schedule": schedule, "scalar": servable(case, needs)}
    return memory.least_workspace(cce.plan, n, v, case.c.shape[1], case.e.dtype, **sizes)
