"""Measured peaks against the plan, at the shapes and budgets of the benchmarks."""

import pytest
import torch

from benchmarks.memory import step_memory
from benchmarks.shapes import SHAPES
from benchmarks.states import make

from .contract import MANY_BLOCKS, SINGLE_PASS

pytestmark = [pytest.mark.large, pytest.mark.cuda_only]


CALLS = [("recompute", name, shape.workspace) for name, shape in SHAPES.items()]
CALLS += [("single_pass", name, SINGLE_PASS.get(name)) for name in SHAPES]
CALLS += [("single_pass", name, workspace) for name, workspace in MANY_BLOCKS.items()]


@pytest.mark.parametrize("schedule, name, workspace", CALLS)
def test_peak_is_as_planned(cce, schedule, name, workspace):
    """Between 90 % and 102 % of the plan, over inputs and gradients, and within the budget."""
    shape = SHAPES[name]
    s = make(shape.n, shape.v, shape.d)
    options = {"workspace": workspace, "schedule": schedule}
    valid = int((s.targets != -100).sum())
    plan = cce.plan(shape.n, shape.v, shape.d, torch.bfloat16, device="cuda", valid=valid, scalar=True, **options)
    e, c = s.e.requires_grad_(), s.c.requires_grad_()
    used = step_memory(lambda: cce.linear_cross_entropy(e, c, s.targets, **options), (e, c)).workspace
    assert 0.90 <= used / plan.workspace <= 1.02, f"{used} bytes used, planned:\n{plan}"
    assert workspace is None or used <= workspace


@pytest.mark.parametrize("name", SHAPES)
def test_forward_alone_needs_next_to_nothing(cce, name):
    """At most 1 % of the 16-bit logits without gradients."""
    shape = SHAPES[name]
    s = make(shape.n, shape.v, shape.d)
    with torch.no_grad():
        used = step_memory(lambda: cce.linear_cross_entropy(s.e, s.c, s.targets)).workspace
    assert used <= 0.01 * 2 * shape.n * shape.v
