"""The memory calculator: its numbers against the planner, its document against its numbers."""

import sys

import pytest

from tools import memory


@pytest.fixture
def llama(cce):
    return memory.Sizes(32768, 128256, 4096, "bfloat16", cce.plan)


def test_formulas(llama):
    assert llama.logits == 32768 * 128256 * 2
    assert llama.materialized == 3 * llama.logits
    assert llama.token_blocks(1024) == 1024 * 128256 * 2 + 128256 * 4096 * 4
    assert llama.token_blocks(10**6) == llama.token_blocks(llama.n)
    assert llama.knee() == 8192


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", memory.ITEMSIZE)
@pytest.mark.parametrize("schedule", ["recompute", "single_pass"])
def test_leanest_is_the_smallest_budget_the_planner_accepts(cce, schedule, dtype, device):
    if (schedule, dtype) == ("single_pass", "float16"):
        pytest.skip("single_pass has no panel of fp16")
    sizes = memory.Sizes(1000, 5003, 320, dtype, cce.plan, device)
    lean = sizes.leanest(schedule)
    assert sizes.planned(lean, schedule).workspace <= lean
    with pytest.raises(ValueError, match="workspace"):
        sizes.planned(lean - 1, schedule)


@pytest.mark.parametrize(
    "n, v, d, largest", [(32768, 128256, 4096, 14336), (1, 1, 1, 1), (7, 176245, 1024, 7), (65535, 1000, 8, 65535)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_block_curve_rises_from_the_leanest_plan_to_the_largest_block(cce, n, v, d, largest, dtype):
    sizes = memory.Sizes(n, v, d, dtype, cce.plan)
    plans = sizes.block_plans()
    blocks, bytes_ = [plan.block for plan in plans], [plan.workspace for plan in plans]
    assert blocks == sorted(set(blocks)) and bytes_ == sorted(bytes_)
    assert plans[-1].block == largest and plans[0].workspace <= sizes.leanest("single_pass")
    assert {plan.schedule for plan in plans} == {"single_pass"}


@pytest.mark.parametrize("n, v, d", [(32768, 128256, 4096), (1, 1, 1), (7, 176245, 1024), (65535, 1000, 8)])
@pytest.mark.parametrize("dtype", memory.ITEMSIZE)
def test_panel_curve_rises_from_the_leanest_plan_to_one_panel(cce, n, v, d, dtype):
    sizes = memory.Sizes(n, v, d, dtype, cce.plan)
    plans = sizes.panel_plans(per_doubling=4)
    panels, bytes_ = [plan.panel for plan in plans], [plan.workspace for plan in plans]
    assert panels == sorted(set(panels))
    assert bytes_ == sorted(bytes_)
    assert plans[-1].panels == 1
    assert plans[0].workspace <= sizes.leanest()


def test_report(llama):
    text = memory.report(llama)
    assert "materialized        23.5 GiB" in text
    assert str(llama.planned()) in text and str(llama.planned(scalar=False)) in text
    assert all(f"{plan.blocks:<16}{plan.block:>12}" in text for plan in llama.block_plans())
    assert f"blocks of {llama.knee()}" in text


def test_report_of_a_dtype_that_single_pass_does_not_serve(cce):
    text = memory.report(memory.Sizes(1000, 5003, 320, "float16", cce.plan))
    assert "single_pass" not in text and "recompute" in text


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")]
)
def test_human(size, text):
    assert memory.human(size) == text


def test_document_holds_the_present_planners_table(cce):
    text = memory.DOCS.read_text()
    assert memory.with_table(text, cce.plan) == text, "docs/memory.md is stale: python -m tools.memory --docs"


def test_figure(llama, tmp_path):
    pytest.importorskip("matplotlib")
    memory.draw(llama, tmp_path / "new" / "memory.png")
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_must_be_positive(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory", "0", "10", "10"])
    with pytest.raises(SystemExit):
        memory.main()
    assert "got N = 0, V = 10, D = 10" in capsys.readouterr().err
