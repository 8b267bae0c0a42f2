"""The numerical contract on the states and shapes of the benchmarks, and two runs that give the same bits."""

import pytest
import torch

from benchmarks.shapes import SHAPES
from benchmarks.states import make
from benchmarks.truth import GRADIENT_BOUND, LOSS_BOUND, relative_error, truth

from .contract import DEVICE, DTYPES, MANY_BLOCKS, SINGLE_PASS, run, same_bits, size


def hold_contract(cce, shape, dtype, calls=None):
    """Each of the calls, {schedule: workspace}, against one float64 truth."""
    shape = size(shape, shape.tiny())
    s = make(shape.n, shape.v, shape.d, dtype, DEVICE)
    inputs = (s.e, s.c, s.targets)
    # fp16 is trained with a loss scale: without one, gradients of 1 / N are subnormal in fp16 whoever computes them.
    scale = 4096.0 if dtype == torch.float16 else 1.0
    want = truth(*inputs, upstream=scale)
    assert size(2.4 <= want.reduced.item() <= 3.1, True), f"the states have a mean loss of {want.reduced.item()}"
    for schedule, workspace in (calls or {"auto": None}).items():
        options = {"upstream": torch.tensor(scale, device=DEVICE), "schedule": schedule}
        options["workspace"] = size(workspace, None)
        got = run(cce.linear_cross_entropy, *inputs, **options)
        same_bits(got, run(cce.linear_cross_entropy, *inputs, **options))
        assert abs(got.loss.item() / want.reduced.item() - 1) <= LOSS_BOUND
        errors = {name: relative_error(getattr(got, name), getattr(want, name)) for name in ("de", "dc")}
        bound = size(GRADIENT_BOUND[dtype], 2 * GRADIENT_BOUND[dtype])
        assert all(err <= bound for err in errors.values()), f"{schedule}: {errors}, at most {bound}"
        assert not got.de[s.targets == -100].any(), "an ignored row has a gradient"


@pytest.mark.large
@pytest.mark.parametrize("name", SINGLE_PASS)
def test_bf16(cce, name):
    budgets = {"recompute": SHAPES[name].workspace, "single_pass": SINGLE_PASS[name]}
    hold_contract(cce, SHAPES[name], torch.bfloat16, budgets)


@pytest.mark.large
@pytest.mark.parametrize("name", MANY_BLOCKS)
def test_bf16_in_many_blocks(cce, name):
    hold_contract(cce, SHAPES[name], torch.bfloat16, {"single_pass": MANY_BLOCKS[name]})


@pytest.mark.large
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes(cce, dtype):
    hold_contract(cce, SHAPES["small"], DTYPES[dtype])


def test_tf32_only_where_allowed(cce):
    """IEEE fp32 by default; the user's switch for matrix products is honoured."""
    s = make(1024, size(8192, 512), 512, torch.float32, DEVICE)
    inputs = (s.e, s.c, s.targets)
    want = truth(*inputs)
    exact = run(cce.linear_cross_entropy, *inputs)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        rounded = run(cce.linear_cross_entropy, *inputs)
    finally:
        matmul.allow_tf32 = before
    assert relative_error(exact.dc, want.dc) <= GRADIENT_BOUND[torch.float32]
    assert relative_error(rounded.dc, want.dc) <= 5e-3
