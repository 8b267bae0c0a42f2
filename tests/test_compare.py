"""The comparison with other implementations: its harness at toy sizes, its record, and what is made from the record."""

import json

import pytest
import torch

from benchmarks import compare_figures as figures
from benchmarks import states, truth
from benchmarks.compare import GROUPS, RESULTS, Compare, Record, message
from benchmarks.evidence import Evidence
from benchmarks.peers import PEERS, Peer, TokenBlocks

NAMES = ["recompute", "lean", "default", "torch_fp32", "torch_blocks", "broken", "as-torch_fp32", "as-broken"]
BROKEN = "ImportError: no module broken in broken.py"


def broken():
    raise ImportError("no module broken\n in /opt/site-packages/broken.py")


@pytest.fixture(scope="module")
def record(cce, tmp_path_factory):
    """One shape and one point of a sweep, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, "broken", Peer("broken", "QuACK, broken", broken))
        path = tmp_path_factory.mktemp("compare") / "compare.json"
        compare = Compare(cce, Evidence(path, "0" * 64), device="cpu", tiny=True)
        compare.run("llama3-8b", GROUPS["llama3-8b"]["llama3-8b"], NAMES)
        compare.run("vocabulary/32000", GROUPS["vocabulary"]["vocabulary/32000"], ["default", "broken"])
        compare.run("vocabulary/32000", GROUPS["vocabulary"]["vocabulary/32000"], ["torch_bf16"], fresh=False)
        yield json.loads(path.read_text())["parts"]


def test_every_entry_has_its_row(record):
    part = record["llama3-8b"]
    assert (part["n"], part["d"], part["ignored"]) == (64, 64, 0.01) and part["torch"] == torch.__version__
    for name in ("recompute", "lean", "default", "torch_fp32", "torch_blocks"):
        row = part["entries"][name]
        assert "failed" not in row, row["failed"]
        assert row["interleaved"] and set(row["samples_ms"]) == {"step", "z", "de", "dc"}
        assert all(3 <= len(samples) <= 10 for samples in row["samples_ms"].values())
        assert set(row["bytes"]["step"]) == {"before", "gradients", "peak"}
        assert row["error"]["de"] < 1e-2 and row["error"]["dc"] < 1e-2
        assert (row.get("planned", {}).keys() == {"bytes", "milliseconds"}) == (name not in PEERS)
    assert "recompute" in part["entries"]["recompute"]["plan"][0]


def test_a_failing_peer_is_shown_with_its_message(record):
    for part in record.values():
        want = {"label": "QuACK, broken", "exact": True, "version": torch.__version__, "failed": BROKEN}
        assert want.items() <= part["entries"]["broken"].items()
    assert f"| QuACK {torch.__version__}, broken | llama3-8b, vocabulary/32000 | {BROKEN} |" in figures.failures(record)


def test_what_failed_late_keeps_what_was_found(record):
    """No memory is measured on a CPU, and no plan fits into none."""
    assert record["llama3-8b"]["entries"]["as-torch_fp32"]["failed"].startswith("ValueError: workspace: got 0 bytes")


def test_the_memory_of_a_peer_that_did_not_run_is_no_entry(record):
    assert "as-broken" not in record["llama3-8b"]["entries"]


def test_a_part_run_again_for_some_entries_keeps_the_others(record):
    assert list(record["vocabulary/32000"]["entries"]) == ["default", "broken", "torch_bf16"]


def test_peers_that_are_quicker_are_shown():
    """In as much memory, by the ratio or by milliseconds; and those of whose memory this kernel was not timed in."""

    def row(label, step, mib, floor=1.0):
        used = {"before": 0, "gradients": 0, "peak": mib << 20}
        samples = {"step": [step], "z": [floor], "de": [floor], "dc": [floor]}
        return {"label": label, "exact": True, "samples_ms": samples, "bytes": {"step": used}}

    ours = {"lean": row("this, lean", 6.0, 20), "ample": row("this, ample", 3.0, 90)}
    peers = {
        "liger": row("Liger", 5.0, 25), "liger_8": row("Liger, 8", 5.0, 90), "fla": row("FLA", 2.9, 90, floor=0.9),
        "quack": row("QuACK", 9.0, 10), "apple": row("Apple", 1.0, 1) | {"exact": False},
    }  # fmt: skip
    lines = figures.quicker({"wide": {"entries": ours | peers}}).splitlines()[2:]
    assert lines == [
        "| wide | Liger | 1.67 | 5.0 | 25 | 2.00 | 6.0 | 20 |",
        "| wide | FLA | 1.07 | 2.9 | 90 | 1.00 | 3.0 | 90 |",
        "| wide | QuACK | 3.00 | 9.0 | 10 | not timed |  |  |",
    ]


def test_messages_are_short_and_name_no_folders():
    text = message(RuntimeError("no /usr/lib/x86/libcuda.so.1, see https://pytorch.org/docs/a.html\n" + "x" * 400))
    assert (
        text.startswith("RuntimeError: no libcuda.so.1, see https://pytorch.org/docs/a.html xxx") and len(text) == 300
    )


@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("torch_") and name != "torch_compile"])
def test_peers_in_plain_torch_are_right(name):
    """Over more than one block of tokens, some ignored, with an upstream gradient."""
    if name == "torch_chunked" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear_cross_entropy")
    s = states.make(TokenBlocks.ROWS + 130, 301, 64, torch.bfloat16, "cpu", ignored=0.3)
    exact = truth.truth(s.e, s.c, s.targets, upstream=2.0)
    s.e.requires_grad_(), s.c.requires_grad_()
    loss = PEERS[name].load()(s.e, s.c, s.targets)
    (2 * loss).backward()
    assert abs(loss.item() / exact.reduced.item() - 1) < 1e-2
    assert truth.relative_error(s.e.grad, exact.de) < 1e-2 and truth.relative_error(s.c.grad, exact.dc) < 1e-2


def test_tables_are_filled_and_stay_filled(record):
    text = "before\n" + "".join(f"<!-- compared:{name} -->\nold\n<!-- /compared -->\n" for name in figures.TABLES)
    filled = figures.fill(text, record, figures.TABLES, "compared")
    assert "old" not in filled and filled.startswith("before\n")
    assert figures.fill(filled, record, figures.TABLES, "compared") == filled
    assert "| this kernel, recompute | " in filled and "Not measured." in filled
    with pytest.raises(ValueError, match="compared:typo: unknown, accepted are"):
        figures.fill("<!-- compared:typo -->\n<!-- /compared -->", record, figures.TABLES, "compared")


def test_figures_are_drawn(record, tmp_path):
    pytest.importorskip("matplotlib")
    parts = json.loads(json.dumps(record))
    for i, row in enumerate(row for part in parts.values() for row in part["entries"].values() if "bytes" in row):
        row["bytes"]["step"] = {"before": 0, "gradients": 0, "peak": (i + 1) << 28}
    figures.draw_shapes(parts, tmp_path / "figures" / "compare.png")
    figures.draw_sweeps(parts, tmp_path / "figures" / "compare-sweeps.png")
    assert all((tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000 for name in ("compare", "compare-sweeps"))


@pytest.mark.skipif(not RESULTS.exists(), reason="no comparison recorded yet")
def test_texts_show_what_was_recorded():
    parts = json.loads(RESULTS.read_text())["parts"]
    for path in figures.TEXTS:
        assert figures.fill(path.read_text(), parts, figures.TABLES, "compared") == path.read_text(), path.name


def test_peers_outlive_a_change_of_the_sources(record, tmp_path):
    path = tmp_path / "compare.json"
    path.write_text(json.dumps({"torch_ext_sha256": "before", "parts": record}))
    assert Record(path, "before").data["parts"] == record
    for name, part in Record(path, "after").data["parts"].items():
        assert set(part["entries"]) == set(record[name]["entries"]) & set(PEERS)
        assert part["entries"].items() <= record[name]["entries"].items()
