"""The plan is arithmetic on sizes: exact sums, one minimum, the same answer every time, and no device asked."""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

SIZES = [(8192, 128256, 4096), (65535, 176245, 1024), (1, 1, 1), (0, 50, 8), (2048, 32000, 1024), (7, 1001, 33)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cuda", "cpu")
MIB = 1 << 20


def least(cce, *args, **kw):
    """The minimum that the error names."""
    with pytest.raises(ValueError, match="workspace") as error:
        cce.plan(*args, workspace=0, **kw)
    return max(int(word) for word in str(error.value).split() if word.isdigit())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_to_the_peak(cce, size, device, dtype):
    """Forward and backward parts do not live together; what is kept between them counts for both."""
    plan = cce.plan(*size, dtype, device=device, need_dbias=True)
    stages = {
        stage: sum(b for name, b in plan.parts.items() if name.split(":")[0] in ("both", stage))
        for stage in ("forward", "backward")
    }
    assert plan.workspace == max(stages.values())
    assert all(isinstance(b, int) and b >= 0 for b in plan.parts.values())
    assert {name.split(":")[0] for name in plan.parts} <= {"both", "forward", "backward"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_minimum_is_the_minimum(cce, size, device, dtype):
    minimum = least(cce, *size, dtype, device=device)
    assert cce.plan(*size, dtype, device=device, workspace=minimum).workspace <= minimum
    if minimum:
        with pytest.raises(ValueError, match=rf"\b{minimum}\b"):
            cce.plan(*size, dtype, device=device, workspace=minimum - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_no_budget_is_exceeded(cce, size, device):
    for dtype, factor in itertools.product(DTYPES, (1.0, 1.3, 2, 10, 100)):
        budget = int(least(cce, *size, dtype, device=device) * factor)
        plan = cce.plan(*size, dtype, device=device, workspace=budget)
        assert plan.workspace <= budget
        assert (plan.panels - 1) * plan.panel < size[1] <= plan.panels * plan.panel


def test_a_larger_budget_never_narrows_the_panel(cce):
    n, v, d = SIZES[0]
    widths = [cce.plan(n, v, d, torch.bfloat16, workspace=b * MIB).panel for b in range(300, 3000, 50)]
    assert widths == sorted(widths) and widths[0] < widths[-1]


def test_default_budget(cce):
    """max(64 MiB, bytes of the inputs, the minimum)."""
    for n, v, d in SIZES:
        for dtype in DTYPES:
            budget = max(64 * MIB, dtype.itemsize * (n + v) * d, least(cce, n, v, d, dtype))
            assert cce.plan(n, v, d, dtype) == cce.plan(n, v, d, dtype, workspace=budget)


def test_panels_are_aligned(cce):
    """The panel's row stride is a multiple of 64 whatever V is."""
    for size, device in itertools.product(SIZES, DEVICES):
        plan = cce.plan(*size, torch.bfloat16, device=device)
        assert plan.panel % 64 == 0


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_operations_are_those_demanded(cce, needs):
    """The fold always; with any gradient the logits once more; one contraction for each of dE and dC."""
    need_de, need_dc, need_dbias = needs
    n, v, d = 128, 1000, 64
    plan = cce.plan(n, v, d, torch.float32, need_de=need_de, need_dc=need_dc, need_dbias=need_dbias)
    assert plan.flops == 2 * n * v * d * (1 + any(needs) + need_de + need_dc)
    if not any(needs):
        assert not [name for name in plan.parts if name.startswith("backward")]
    if not need_de:
        assert not [name for name in plan.parts if "dE" in name]


def test_ignored_rows_need_less(cce):
    n, v, d = SIZES[0]
    few = cce.plan(n, v, d, torch.bfloat16, valid=n // 10, workspace=400 * MIB)
    all_of_them = cce.plan(n, v, d, torch.bfloat16, workspace=400 * MIB)
    assert few.flops < all_of_them.flops and few.panels <= all_of_them.panels


def test_the_budgets_of_the_project(cce):
    """Sizes and budgets that the measurements are made at."""
    for (n, v, d), budget in (
        ((8192, 128256, 4096), 400 * MIB),
        ((8192, 256000, 2304), 320 * MIB),
        ((65536, 128256, 2048), 1536 * MIB),
        ((65535, 176245, 1024), 1280 * MIB),
    ):
        plan = cce.plan(n, v, d, torch.bfloat16, workspace=budget)
        assert plan.workspace <= budget
        assert plan.flops == 8 * n * v * d


def test_dtype_by_name(cce):
    assert cce.plan(100, 1000, 64, "bfloat16") == cce.plan(100, 1000, 64, torch.bfloat16)
    with pytest.raises(TypeError, match=r"dtype.*float64.*bfloat16.*float16.*float32"):
        cce.plan(100, 1000, 64, torch.float64)


def test_unknown_schedule(cce):
    with pytest.raises(ValueError, match=r"schedule.*'fast'.*'recompute'"):
        cce.plan(100, 1000, 64, torch.bfloat16, schedule="fast")


def test_it_prints(cce):
    plan = cce.plan(8192, 128256, 4096, torch.bfloat16, workspace=400 * MIB)
    text = str(plan)
    assert "recompute" in text and "peak" in text
    assert all(name in text for name in plan.parts)
    assert math.isclose(float(text.split("peak")[1].split()[0]), plan.workspace / MIB, abs_tol=0.01)


def test_frozen(cce):
    plan = cce.plan(100, 1000, 64, torch.bfloat16)
    with pytest.raises(AttributeError):
        plan.panel = 1


def test_the_same_in_another_process(cce):
    """Neither the machine, nor what is free on it, nor the order of calls has a say; torch is not even imported."""
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("planner", {os.path.join(os.path.dirname(cce.__file__), "planner.py")!r})
planner = sys.modules["planner"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planner)
for size in {SIZES!r}:
    print(repr(planner.plan(*size, "bfloat16")))
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [repr(cce.plan(*size, torch.bfloat16)) for size in SIZES]
