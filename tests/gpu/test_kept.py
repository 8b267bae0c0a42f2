"""Panels kept since the forward: per-token losses between 8 and 6 N V D."""

import pytest
import torch

from benchmarks.memory import step_memory
from benchmarks.shapes import GIB, SHAPES, Shape
from benchmarks.states import make

from .contract import DEVICE, hold, random_upstream, run, same_bits, size

N, V, D = size((8192, 65011, 1024), (40, 331, 64))
OPTIONS = {
    "plain": {},
    "lse": {"return_lse": True, "upstream_lse": 1.0, "bias": True},
    "softcap": {"softcap": 30.0},
    "sum": {"reduction": "sum"},
    # Upstream gradients alike and half of the mass: else the term of rank one is too small in each class to be seen.
    "smooth": {"label_smoothing": 0.5, "reduction": "sum", "bias": True},
}


def planned(cce, kept, **options):
    """A budget for a share of the panel, with the columns that are kept in it."""
    workspace = int((24 << 20) + 2 * N * V * kept)
    return workspace, cce.plan(N, V, D, torch.bfloat16, workspace=workspace, schedule="recompute", **options).kept


@pytest.mark.parametrize("ignored", [0.0, 0.02, 0.6])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kept", [0.7, 1.2])
def test_contract(cce, kept, name, ignored):
    options = {"reduction": "none", "schedule": "recompute"} | OPTIONS[name]
    s = make(N, V, D, torch.bfloat16, DEVICE, ignored=ignored)
    bias = s.bias if options.pop("bias", False) else None
    options["workspace"], columns = planned(cce, kept, need_dbias=bias is not None)
    if DEVICE == "cuda":
        assert columns == V if kept > 1 else 0 < columns < V
    if options["reduction"] == "none":
        options["upstream"] = random_upstream((N,))
    if "upstream_lse" in options:
        options["upstream_lse"] = random_upstream((N,), seed=2)
    result = hold(cce, s.e, s.c, s.targets, bias, **options)
    same_bits(result, run(cce.linear_cross_entropy, s.e, s.c, s.targets, bias, **options))


@pytest.mark.large
@pytest.mark.cuda_only
@pytest.mark.parametrize("gib", [1, 3])
def test_peak_is_as_planned(cce, gib):
    shape: Shape = SHAPES["llama3-8b"]
    s = make(shape.n, shape.v, shape.d)
    options = {"workspace": gib * GIB, "schedule": "recompute"}
    plan = cce.plan(shape.n, shape.v, shape.d, torch.bfloat16, **options)
    assert plan.kept
    e, c = s.e.requires_grad_(), s.c.requires_grad_()

    def loss():
        return cce.linear_cross_entropy(e, c, s.targets, reduction="none", **options).sum()

    used = step_memory(loss, (e, c)).workspace
    assert 0.90 <= used / plan.workspace <= 1.02, f"{used} bytes used, planned:\n{plan}"
