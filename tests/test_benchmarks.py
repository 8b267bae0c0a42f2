"""What the GPU measurements stand on: float64 truth in blocks, the synthetic states, and the harness at toy sizes."""

import json
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from common import pool

import benchmarks.truth as blocks
from benchmarks import bars, bench, fuzz, sanitize_target, states
from benchmarks.shapes import SHAPES

OPTIONS = [
    {},
    {"reduction": "sum", "softcap": 5.0},
    {"bias": True, "logit_scale": -0.6, "reduction": "none"},
    {"bias": True, "softcap": 5.0, "logit_scale": 1.4, "reduction": "none", "lse": True},
    {"bias": True, "softcap": 5.0, "shift": True, "reduction": "none", "lse": True},
    {"shift": True, "lse": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)) or "plain")
def test_truth_in_blocks_is_the_reference(cce, options, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK_BYTES", 8 * 128 * 5)  # five rows at a time
    options, rng = dict(options), torch.Generator().manual_seed(0)
    e, c, b = (torch.randn(*s, generator=rng).double() for s in ((3, 7, 16), (101, 16), (101,)))
    targets = torch.randint(101, (3, 7), generator=rng)
    targets[:, ::3] = -100
    bias = b if options.pop("bias", False) else None
    shape = (3, 6 if options.get("shift") else 7)
    g = (
        torch.randn(shape, generator=rng).double()
        if options.get("reduction") == "none"
        else torch.tensor(-1.5).double()
    )
    h = torch.randn(shape, generator=rng).double() if options.pop("lse", False) else torch.zeros(shape).double()

    got = blocks.truth(e, c, targets, bias, upstream=g, upstream_lse=h, **options)
    leaves = [t.requires_grad_() for t in (e, c, b)]
    bias = None if bias is None else b
    loss, lse = cce.reference.linear_cross_entropy(e, c, targets, bias, return_lse=True, **options)
    want = torch.autograd.grad((loss, lse), leaves if bias is not None else leaves[:2], (g, h))
    assert torch.allclose(got.reduced, loss, rtol=1e-12)
    assert torch.allclose(got.lse, lse, rtol=1e-12)
    for name, gradient in zip(("de", "dc", "dbias"), want, strict=False):
        assert torch.allclose(getattr(got, name), gradient, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("shape", [(1024, 8192, 512), (512, 32000, 1024)], ids=str)
def test_states_look_trained(shape):
    """Mean loss 2.4 to 3.1 with both confident and lost tokens, 1 % ignored, frequent ids first."""
    s = states.make(*shape, torch.bfloat16, "cpu")
    valid = s.targets != -100
    loss = F.cross_entropy(s.e.float() @ s.c.float().T, s.targets, reduction="none")[valid]
    assert 2.4 <= loss.mean() <= 3.1
    assert loss.quantile(0.25) < 0.5 and loss.quantile(0.9) > 6
    assert 0.98 <= valid.float().mean() < 1
    assert (s.targets[valid] < shape[1] // 10).float().mean() > 0.6


def test_measuring_one_shape(cce):
    """Every step of a row that is measured beside the bare GEMMs, at toy sizes."""
    rows = {}
    bench.Bench(cce, rows.__setitem__, device="cpu", tiny=True).run("small")
    assert set(rows["small"]["samples_ms"]) == {
        "forward", "step", "z", "de", "dc", "materialized_bf16", "materialized_fp32"
    }  # fmt: skip
    found = {finding.bar.what: finding.value for finding in bars.judge(rows) if finding.bar.row == "small"}
    assert found["forward and backward over materialized bf16"] > 0


def test_error_row_is_within_the_contract(cce):
    rows = {}
    bench.Bench(cce, rows.__setitem__, device="cpu", tiny=True).error()
    found = [row[schedule] for row in rows.values() for schedule in ("recompute", "single_pass")]
    assert all(errors["loss"] <= 1e-5 and max(errors["de"], errors["dc"]) <= 5e-3 for errors in found)


@pytest.mark.parametrize("path", sanitize_target.SIZES)
def test_sanitizer_cases_run(cce, path):
    cases = [case for case in sanitize_target.cases() if case[0].startswith(path) and case[2] == torch.bfloat16]
    assert cases
    for _, sizes, dtype, options in cases:
        sanitize_target.run_case(cce, sizes, dtype, options, "cpu")


def test_options_are_all_measured(cce):
    rows = {}
    bench.Bench(cce, rows.__setitem__, device="cpu", tiny=True).run("options")
    measured = set(rows["options"]["samples_ms"])
    by_single_pass = {name for name in measured if name.startswith("single_pass/")}
    assert measured - by_single_pass == {"plain", *bars.OPTION_COSTS}
    assert len(by_single_pass) == 1 + sum(bar.row == "options" and "by single_pass" in bar.what for bar in bars.BARS)


@pytest.mark.parametrize("seed", [5, 77, 139, 3000])
def test_drawn_call_is_the_same_when_drawn_again_and_when_moved(seed):
    first, again = pool.draw(seed), pool.draw(seed)
    assert first.about == again.about
    there = pool.moved(first.case, "cpu")
    for name in ("e", "c", "targets"):
        a, b, other = (getattr(case, name) for case in (first.case, there, again.case))
        assert torch.equal(a, b) and torch.equal(a, other)
        assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())


def test_fuzz_shares_out_every_seed_and_reports_what_fails(cce, monkeypatch, tmp_path):
    """Three processes' shares are all seeds once; a loss that is off is a failure that names its arguments."""
    checked = []

    def off(cce, seed, device, reference):
        checked.append(seed)
        assert seed != 11, "loss: off by 1"

    monkeypatch.setattr(fuzz, "check", off)
    monkeypatch.setattr(fuzz.kernel, "load", lambda: cce)
    failures = []
    for i in range(3):
        report = tmp_path / f"{i}.json"
        fuzz.work(Namespace(share=f"{i}/3", examples=400, report=report, device="cpu", reference="cpu"))
        failures += json.loads(report.read_text())["failures"]
    assert sorted(checked) == list(range(400))
    assert [failure["seed"] for failure in failures] == [11] and "targets (" in failures[0]["arguments"]


def test_aligned_vocabularies():
    assert all(shape.v_aligned % 64 == 0 and 0 <= shape.v_aligned - shape.v < 64 for shape in SHAPES.values())
