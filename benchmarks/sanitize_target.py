"""What compute-sanitizer watches: forward and backward at small ragged sizes over paths, dtypes and options.

`sanitize_target.py options [I/K]` runs them, or the I-th of K shares of them; `sanitize_target.py planted` writes past
the end of a tensor, to show that the tool in use reports such a write.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel  # noqa: E402
from tools.memory import least_workspace  # noqa: E402

DEVICE = os.environ.get("CCE_TEST_DEVICE", "cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAPPED = {"softcap": 20.0, "logit_scale": 1.3}
# Each of N, V, D past a tile or short of one; D = 72 has rows that a descriptor can address, D = 67 has not.
SIZES = {"descriptors": (130, 517, 72), "pointers": (130, 517, 67), "tiny": (3, 5, 8)}
OPTIONS = {
    "plain": {},
    "everything": {"bias": True, "reduction": "none", "return_lse": True, **CAPPED},
    "panels": {"reduction": "sum", "workspace": True},
}
BF16_OPTIONS = {
    "bias": {"bias": True},
    "softcap": {"softcap": 20.0},
    "lse": {"return_lse": True},
    "shift": {"shift": True, "reduction": "none"},
    "frozen-e": {"frozen": "e"},
    "frozen-c": {"frozen": "c"},
    "ignored": {"ignored": 0.9},
    # As in large calls: relative to the targets' logits, over the list of rows that count where those are few.
    "large": {"large": True, "reduction": "sum"},
    "large-ignored": {"large": True, "reduction": "none", "ignored": 0.9},
    # The panel in one block of tokens, and in several, over which dC is summed in 16 bits where there are 517 classes.
    "single": {"schedule": "single_pass", "bias": True, **CAPPED},
    "blocks": {"schedule": "single_pass", "workspace": True, "tokens": 300},
    "blocks-large": {"schedule": "single_pass", "workspace": True, "tokens": 300, "large": True, "z_loss": 0.1},
}


def cases():
    """(name, sizes, dtype, options): the matrix for every dtype, further options for bf16."""
    for path, sizes in SIZES.items():
        for dtype in DTYPES:
            for name, options in (OPTIONS | (BF16_OPTIONS if dtype == torch.bfloat16 else {})).items():
                yield f"{path}-{str(dtype).removeprefix('torch.')}-{name}", sizes, dtype, options


def run_case(cce, sizes, dtype, options, device=DEVICE) -> None:
    options = dict(options)
    n, v, d = options.pop("tokens", sizes[0]), *sizes[1:]
    rng = torch.Generator().manual_seed(n + v + d)
    e, c, bias = (torch.randn(*shape, generator=rng).to(device, dtype) for shape in ((n, d), (v, d), (v,)))
    targets = torch.randint(v, (n,), generator=rng)
    targets[torch.rand(n, generator=rng) < options.pop("ignored", 0.2)] = -100
    frozen = options.pop("frozen", None)
    leaves = {"e": e, "c": c} | ({"bias": bias} if options.pop("bias", False) else {})
    for name, t in leaves.items():
        t.requires_grad_(name != frozen)
    if options.get("workspace"):
        # As many panels of the vocabulary, or blocks of tokens, as can be.
        schedule = options.get("schedule", "recompute")
        call = {"device": device, "schedule": schedule, "scalar": schedule == "single_pass", "need_dbias": True}
        options["workspace"] = least_workspace(cce.plan, n, v, d, dtype, **call)
    configs = sys.modules[f"{cce.__name__}.backends.triton.configs"]
    with patch.object(configs, "SMALL", 0) if options.pop("large", False) else nullcontext():
        out = cce.linear_cross_entropy(targets=targets.to(device), **leaves, **options)
        out = out if isinstance(out, tuple) else (out,)
        # By an upstream gradient of 1 nothing would be scaled.
        (3.0 * sum(x.sum() for x in out)).backward()
        # On a CPU the fold alone may need more than `single_pass` in many blocks does.
        with torch.no_grad():
            cce.linear_cross_entropy(targets=targets.to(device), **leaves, **options | {"workspace": None})


def show_writes(cce) -> None:
    """initcheck does not see what is stored by descriptors, as the panel is here and matrices are by cuBLAS.

    Panels are written before they are, and products are sums of plain operations. That no kernel reads what was never
    stored in a panel is for the tests with buffers full of NaN.
    """

    def product(a, b):
        return (a.float().unsqueeze(2) * b.float().unsqueeze(0)).sum(1)

    def mm(a, b, *, out, out_dtype=None):
        return out.copy_(product(a, b))

    def addmm(accumulator, a, b, *, out, out_dtype=None):
        return out.copy_(accumulator + product(a, b))

    torch.mm, torch.addmm = mm, addmm
    torch.Tensor.addmm_ = lambda accumulator, a, b: addmm(accumulator, a, b, out=accumulator)
    backend = sys.modules[f"{cce.__name__}.backends.triton"]
    backend.new_panel = lambda e, live, width: e.new_zeros(live, width)


def run_options(share: str = "0/1") -> dict:
    cce = kernel.load()
    if "SANITIZE_SHOW_WRITES" in os.environ:
        show_writes(cce)
    names = []
    first, step = map(int, share.split("/"))
    for name, sizes, dtype, options in list(cases())[first::step]:
        run_case(cce, sizes, dtype, options)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        names.append(name)
    return {"cases": names, "launches": dict(kernel.launches(cce)) if DEVICE == "cuda" else {}}


@triton.jit
def unmasked_store(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)


def run_planted() -> dict:
    """1000 elements, 1024 lanes."""
    x = torch.zeros(1000, device="cuda")
    unmasked_store[(1,)](x, BLOCK=1024)
    torch.cuda.synchronize()
    return {"cases": ["planted"], "launches": {"unmasked_store": 1}}


def main() -> None:
    mode, *arguments = sys.argv[1:] or ["options"]
    report = {"options": run_options, "planted": run_planted}[mode](*arguments)
    if "SANITIZE_REPORT" in os.environ:
        Path(os.environ["SANITIZE_REPORT"]).write_text(json.dumps(report))
    print(f"{mode}: {len(report['cases'])} cases, {sum(report['launches'].values())} launches", flush=True)


if __name__ == "__main__":
    main()
