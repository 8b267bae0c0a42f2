"""What tests of schedule `single_pass` share: sizes, blocks as small as can be, a workspace that makes so many blocks.

In the interpreter blocks of tokens are multiples of 16 here, as its tiles are, 16 classes count as frequent, and bf16
is taught to it.
"""

import importlib
import itertools

import pytest
import torch
from common.bfloat16 import teach_bfloat16
from common.draws import least_workspace
from helpers import INTERPRET, PLANNED_FOR, make_case, pick

N, V, D = pick((50, 521, 40), (9, 70, 20))
# Tokens of up to three blocks, the smallest block, and a hidden size at which fewer blocks take more memory.
MANY, STEP, NARROW = pick((300, 128, 40), (45, 16, 8))
BOTH, EVERY = ("e", "c"), ("e", "c", "bias")
DTYPES = (torch.bfloat16, torch.float32)
SOME = DTYPES[:1] if INTERPRET else DTYPES


def teach(cce, monkeypatch):
    """What the docstring above says of the interpreter."""
    planner = importlib.import_module(f"{cce.__name__}.planner")
    monkeypatch.setattr(planner, "LEAST_BLOCK", STEP)
    monkeypatch.setattr(planner, "FREQUENT", STEP // 4)
    planner.plan.cache_clear()
    teach_bfloat16(monkeypatch)


def take_all_rows(cce, monkeypatch):
    """Nobody waits for the count of valid rows, as in a CUDA graph or in a small problem: all rows are taken."""
    monkeypatch.setattr(cce.backends.triton_backend.configs, "is_small", lambda *sizes: True)


@pytest.fixture(autouse=True)
def interpreted(cce, monkeypatch):
    if INTERPRET:
        teach(cce, monkeypatch)


@pytest.fixture
def uncounted(cce, monkeypatch):
    if INTERPRET:
        take_all_rows(cce, monkeypatch)


def some(*axes):
    """Every combination, in the interpreter every second one: each value still meets each of the others."""
    combinations = itertools.product(*map(enumerate, axes))
    kept = (c for c in combinations if not INTERPRET or sum(i for i, _ in c) % 2 == 0)
    return [tuple(value for _, value in c) for c in kept]


def single(shape, v, d, dtype=torch.float32, **options):
    return make_case(shape, v, d, dtype, schedule="single_pass", **options)


def planned(cce, case, workspace, needs=BOTH):
    """The plan of the case by `single_pass` in so many bytes."""
    n, (v, d) = case.targets.numel(), case.c.shape
    v = case.options.get("vocab_size") or v
    call = {"device": PLANNED_FOR, "schedule": "single_pass", "scalar": True, "need_dbias": "bias" in needs}
    return cce.plan(n, v, d, case.e.dtype, workspace=workspace, **call)


def with_blocks(cce, case, blocks, needs=BOTH, rounded=False):
    """The case in the smallest workspace that makes no more blocks than these; if asked by 16-bit sums of dC."""
    low, high = least_workspace(cce, case, needs), 1 << 28
    while low < high:
        middle = (low + high) // 2
        enough = planned(cce, case, middle, needs).blocks <= blocks
        low, high = (low, middle) if enough else (middle + 1, high)
    plan = planned(cce, case, low, needs)
    assert plan.blocks == blocks, f"no workspace makes {blocks} blocks, {low} bytes make {plan.blocks}"
    sums_of_16_bits = PLANNED_FOR == "cpu" or 0 < plan.fp32_rows < len(case.c)
    assert sums_of_16_bits or not rounded, f"all of dC is summed in fp32:\n{plan}"
    return case.but(workspace=low)
