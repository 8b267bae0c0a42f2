"""The plan is arithmetic on sizes: exact sums, one minimum, the same answer every time, and no device asked."""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from tools.memory import least_workspace

SIZES = [(8192, 128256, 4096), (65535, 176245, 1024), (1, 1, 1), (0, 50, 8), (2048, 32000, 1024), (7, 1001, 33)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cuda", "cpu")
MIB = 1 << 20


def calls(dtype):
    """What distinguishes calls of one size: who can serve them, and who is to."""
    scalar = [{"scalar": True}, {"scalar": True, "schedule": "single_pass"}]
    scalar.append({"scalar": True, "schedule": "single_pass", "need_dbias": True})
    return [{}, {"need_dbias": True}] + scalar * (dtype != torch.float16)


def planned(cce, *args, **kw):
    """The plan, or None where the workspace is too small."""
    try:
        return cce.plan(*args, **kw)
    except ValueError as error:
        assert "workspace" in str(error)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_to_the_peak(cce, size, device, dtype):
    """Forward and backward parts do not live together; what is kept between them counts for both."""
    for call in calls(dtype):
        if call.get("schedule") and 0 in size:
            continue
        budget = max(64 * MIB, least_workspace(cce.plan, *size, dtype, device=device, **call))
        plan = cce.plan(*size, dtype, device=device, workspace=budget, **call)
        stages = {
            stage: sum(b for name, b in plan.parts.items() if name.split(":")[0] in ("both", stage))
            for stage in ("forward", "backward")
        }
        assert plan.workspace == max(stages.values())
        assert all(isinstance(b, int) and b >= 0 for b in plan.parts.values())
        assert {name.split(":")[0] for name in plan.parts} <= {"both", "forward", "backward"}
        if plan.schedule == "single_pass":
            assert plan.workspace == sum(plan.parts.values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_minimum_is_the_minimum(cce, size, device, dtype):
    for call in calls(dtype):
        if call.get("schedule") and 0 in size:
            continue
        minimum = least_workspace(cce.plan, *size, dtype, device=device, **call)
        assert cce.plan(*size, dtype, device=device, workspace=minimum, **call).workspace <= minimum
        if minimum:
            with pytest.raises(ValueError, match=rf"\b{minimum}\b"):
                cce.plan(*size, dtype, device=device, workspace=minimum - 1, **call)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_no_budget_is_exceeded(cce, size, device):
    for dtype, factor in itertools.product(DTYPES, (1.0, 1.3, 2, 10, 100)):
        for call in calls(dtype):
            if call.get("schedule") and 0 in size:
                continue
            budget = int(least_workspace(cce.plan, *size, dtype, device=device, **call) * factor)
            plan = cce.plan(*size, dtype, device=device, workspace=budget, **call)
            assert plan.workspace <= budget
            rest = size[1] - plan.kept
            assert (plan.panels - 1) * plan.panel < max(rest, 1) and rest <= plan.panels * plan.panel
            assert (plan.blocks - 1) * plan.block < max(size[0], 1) <= max(plan.blocks * plan.block, 1)


def test_a_larger_budget_never_narrows_the_panel(cce):
    n, v, d = SIZES[0]
    widths = [cce.plan(n, v, d, torch.bfloat16, workspace=b * MIB, kept=0).panel for b in range(300, 3000, 50)]
    assert widths == sorted(widths) and widths[0] < widths[-1]


def test_a_larger_budget_is_never_slower(cce):
    """More columns are kept, until all are."""
    n, v, d = SIZES[0]
    plans = [cce.plan(n, v, d, torch.bfloat16, workspace=b * MIB) for b in range(300, 3000, 50)]
    times = [plan.milliseconds for plan in plans]
    assert times == sorted(times, reverse=True)
    assert plans[0].kept == 0 and plans[-1].kept == v and plans[-1].flops == 6 * n * v * d


def test_a_scalar_loss_with_room_takes_single_pass(cce):
    """It then does the same products as `recompute` that keeps all, and passes over less besides."""
    for n, v, d in ((8192, 128256, 4096), (8192, 256000, 2304), (8192, 32000, 4096)):
        plan = cce.plan(n, v, d, torch.bfloat16, workspace=16 << 30, scalar=True)
        assert (plan.schedule, plan.blocks) == ("single_pass", 1)


def test_default_budget(cce):
    """max(64 MiB, bytes of the inputs, what panels of 4096 columns need)."""
    for n, v, d in SIZES:
        for dtype in DTYPES:
            inputs = max(64 * MIB, dtype.itemsize * (n + v) * d)
            plan = cce.plan(n, v, d, dtype)
            assert plan.workspace <= inputs or plan.panel <= 4096
            assert plan == cce.plan(n, v, d, dtype, workspace=max(inputs, plan.workspace), kept=0)


@pytest.mark.parametrize("n, v, d", [(32768, 32000, 4096), (65536, 128256, 2048), (8192, 256000, 2304)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_default_budget_for_both_schedules(cce, n, v, d, dtype):
    """The faster one within what `recompute` may take on its own."""
    budget = max(64 * MIB, dtype.itemsize * (n + v) * d, cce.plan(n, v, d, dtype).workspace)
    auto, alone = (cce.plan(n, v, d, dtype, scalar=True, schedule=name) for name in ("auto", "recompute"))
    assert alone.workspace <= budget and auto.workspace <= budget
    assert auto == cce.plan(n, v, d, dtype, scalar=True, workspace=budget, kept=0)


def test_default_schedule(cce):
    """Llama 2 7B at 4 x 8192 tokens has room for blocks of tokens; so has a 16-bit call on a CPU."""
    assert cce.plan(32768, 32000, 4096, torch.bfloat16, scalar=True).schedule == "single_pass"
    for dtype in (torch.bfloat16, torch.float32):
        small = cce.plan(4096, 49152, 576, dtype, device="cpu", scalar=True)
        assert small.schedule == "single_pass" and small.block == 512


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


BUDGETS = [int(2 ** (20 + k / 4)) for k in range(72)]


@pytest.mark.parametrize("size", [*SIZES[:2], (65536, 128256, 2048), (8192, 256000, 2304), (300, 521, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_larger_budget_never_predicts_a_longer_time(cce, size, dtype):
    plans = {budget // MIB: planned(cce, *size, dtype, workspace=budget, scalar=True) for budget in BUDGETS}
    served = [(mib, plan.milliseconds, plan.blocks, plan.panels) for mib, plan in plans.items() if plan]
    longer = [pair for pair in itertools.pairwise(served) if pair[1][1] > pair[0][1]]
    assert not longer, f"(MiB, ms, blocks, panels) of less and more: {longer}"


@pytest.mark.parametrize("size", [SIZES[0], (65536, 128256, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_is_the_faster_one(cce, size, dtype):
    """Of those that fit, by predicted time; a call that single_pass cannot serve gets the other one."""
    chosen = set()
    for budget in BUDGETS:
        auto, *plans = (
            planned(cce, *size, dtype, workspace=budget, scalar=True, schedule=schedule)
            for schedule in ("auto", "recompute", "single_pass")
        )
        if auto is None:
            assert plans == [None, None]
            continue
        assert auto in plans and auto.milliseconds == min(plan.milliseconds for plan in plans if plan)
        chosen.add(auto.schedule)
    assert "single_pass" in chosen
    assert cce.plan(*size, dtype, workspace=BUDGETS[-1]).schedule == "recompute"


@pytest.mark.parametrize("size", [*SIZES[:3], *SIZES[4:]])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_asked_for_schedule_has_a_default_budget(cce, size, device, dtype):
    """Without a workspace the default is never below what the schedule needs."""
    other = cce.plan(*size, dtype, device=device).workspace
    plan = cce.plan(*size, dtype, device=device, schedule="single_pass", scalar=True)
    needed = least_workspace(cce.plan, *size, dtype, device=device, schedule="single_pass", scalar=True)
    sixth = 0 if device == "cuda" else 2 * size[0] * size[1]
    assert plan.workspace <= max(64 * MIB, dtype.itemsize * (size[0] + size[1]) * size[2], other, needed, sixth)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_operations_of_single_pass(cce, needs):
    """The logits once, and one contraction for each gradient; fp32 dC for what too many blocks add to it in 16 bits."""
    n, v, d = 20000, 5000, 64
    sizes = {"need_de": needs[0], "need_dc": needs[1], "scalar": True, "schedule": "single_pass"}
    plan = cce.plan(n, v, d, torch.bfloat16, **sizes)
    assert plan.flops == 2 * n * v * d * (1 + sum(needs))
    lean = least_workspace(cce.plan, n, v, d, torch.bfloat16, **sizes)
    small = cce.plan(n, v, d, torch.bfloat16, workspace=lean, **sizes)
    assert small.block == 64 and small.blocks == 313 and small.flops == plan.flops
    assert (4 * v * d in small.parts.values()) == needs[1]


def test_frequent_ids(cce):
    """Of 16-bit sums over more blocks more rows are in fp32; over too many, and of a small vocabulary, all are."""
    v, d, call = 128256, 4, {"scalar": True, "schedule": "single_pass"}
    for blocks, rows in ((1, 0), (2, 256), (32, 256), (33, 264), (160, 1280), (161, v)):
        n = 64 * blocks
        lean = least_workspace(cce.plan, n, v, d, torch.bfloat16, **call)
        found = cce.plan(n, v, d, torch.bfloat16, workspace=lean, **call)
        assert (found.blocks, found.fp32_rows) == (blocks, rows)
    small = cce.plan(8192, 256, 4096, torch.bfloat16, workspace=24 * MIB, **call)
    assert small.blocks > 1 and small.fp32_rows == 256


def test_blocks_are_not_larger_than_pays(cce):
    plan = cce.plan(65536, 128256, 4096, torch.bfloat16, scalar=True, workspace=1 << 40)
    assert plan.schedule == "single_pass" and plan.block <= 16384


@pytest.mark.parametrize("call", [{}, {"scalar": True, "need_dbias": True, "need_de": False, "need_dc": False}])
def test_single_pass_needs_a_scalar_loss_with_gradients(cce, call):
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"single_pass.*scalar"):
            cce.plan(100, 1000, 64, dtype, schedule="single_pass", **call)
        assert cce.plan(100, 1000, 64, dtype, **call).schedule == "recompute"
    with pytest.raises(ValueError, match="single_pass"):
        cce.plan(100, 1000, 64, torch.float16, schedule="single_pass", scalar=True)


def test_single_pass_at_the_budgets_of_the_project(cce):
    for (n, v, d), budget in (
        ((8192, 128256, 4096), 1126 * MIB),
        ((8192, 256000, 2304), 2304 * MIB),
        ((65536, 128256, 2048), 1792 * MIB),
        ((65535, 176245, 1024), 1792 * MIB),
    ):
        plan = cce.plan(n, v, d, torch.bfloat16, workspace=budget, scalar=True)
        assert plan.workspace <= budget and plan.schedule == "single_pass"
        assert plan.flops == 6 * n * v * d


def test_dtype_by_name(cce):
    assert cce.plan(100, 1000, 64, "bfloat16") == cce.plan(100, 1000, 64, torch.bfloat16)
    with pytest.raises(TypeError, match=r"dtype.*float64.*bfloat16.*float16.*float32"):
        cce.plan(100, 1000, 64, torch.float64)


def test_unknown_schedule(cce):
    with pytest.raises(ValueError, match=r"schedule.*'fast'.*'recompute'"):
        cce.plan(100, 1000, 64, torch.bfloat16, schedule="fast")


@pytest.mark.parametrize("schedule", ["recompute", "single_pass"])
@pytest.mark.parametrize("device", DEVICES)
def test_it_prints(cce, schedule, device):
    """One line of what and how long, then bytes by name; a time only of the device that it is predicted for."""
    options = {"device": device, "workspace": 8192 * MIB, "schedule": schedule, "scalar": True}
    plan = cce.plan(8192, 128256, 4096, torch.bfloat16, **options)
    text = str(plan)
    assert schedule in text and "peak" in text
    assert all(name in text for name in plan.parts)
    assert math.isclose(float(text.split("peak")[1].split()[0]), plan.workspace / MIB, abs_tol=0.01)
    assert (" ms " in text) == (device == "cuda") == (plan.milliseconds is not None)


def test_frozen(cce):
    plan = cce.plan(100, 1000, 64, torch.bfloat16)
    with pytest.raises(AttributeError):
        plan.panel = 1


def test_the_same_in_another_process(cce):
    """Neither the machine, nor what is free on it, nor the order of calls has a say; torch is not even imported."""
    code = f"""
import sys, types
package = sys.modules["package"] = types.ModuleType("package")
package.__path__ = [{os.path.dirname(cce.__file__)!r}]
from package import planner
for size in {SIZES!r}:
    print(repr(planner.plan(*size, "bfloat16")), repr(planner.plan(*size, "bfloat16", scalar=True)))
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    plans = [[cce.plan(*size, torch.bfloat16, scalar=scalar) for scalar in (False, True)] for size in SIZES]
    assert result.stdout.splitlines() == [" ".join(map(repr, pair)) for pair in plans]
