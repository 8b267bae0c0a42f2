"""The CPU benchmark: its losses at toy sizes, and the bars against what it recorded."""

import json

import pytest
import torch

from benchmarks import cpu, kernel, states

RECORD = kernel.ROOT / "benchmarks" / "results" / "cpu.json"


@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_what_is_timed_is_one_loss(cce, dtype):
    s = states.make(33, 300, 64, getattr(torch, dtype), "cpu", ignored=0.0)
    found = {name: loss(s.e, s.c, s.targets).item() for name, loss in cpu.losses(cce, dtype).items()}
    logits_rounded = found.pop("materialized") if dtype == "bfloat16" else found["kernel"]
    assert max(found.values()) - min(found.values()) < 1e-5 * found["kernel"]
    assert logits_rounded == pytest.approx(found["kernel"], rel=1e-2)


def test_the_record_meets_the_bars():
    rows = json.loads(RECORD.read_text())["rows"]
    assert set(rows) == set(cpu.DTYPES)
    for row in rows.values():
        assert (row["n"], row["v"], row["d"]) == (cpu.SMOLLM2.n, cpu.SMOLLM2.v, cpu.SMOLLM2.d)
        assert row["plan"][0].startswith("single_pass")
    missed = [(what, ratio) for what, ratio, bar in cpu.judge(rows) if ratio > bar]
    assert not missed
