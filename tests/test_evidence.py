"""The checker of the GPU evidence: good evidence passes, and each way of being bad is named."""

import copy
import json

import pytest

from benchmarks import bars, figures, sanitize
from benchmarks.evidence import RESULTS, Evidence
from benchmarks.recorder import summary
from benchmarks.sanitize import parse
from benchmarks.shapes import SHAPES
from tools.check_evidence import KERNELS, NO_BUDGET, SIZES, check, collected

SHA = "0123456789abcdef" * 4
NODE = "tests/gpu/test_a.py::test_x"
NODES = {NODE, "tests/gpu/test_a.py::test_y[bf16]"}
SPEED = 700e9  # operations per millisecond of the synthetic floors


def gemm(shape):
    return 2 * shape.n * shape.v_aligned * shape.d / SPEED


def bench_row(name, shape):
    """A row that meets its bars with a little room."""
    row = {"n": shape.n, "v": shape.v, "d": shape.d, "v_aligned": shape.v_aligned}
    row["budget"] = None if name in NO_BUDGET else shape.workspace
    one = gemm(shape)
    times = {"z": one, "de": one, "dc": one, "forward": 1.05 * one, "step": 4.2 * one, "materialized_bf16": 3.1 * one}
    if name.startswith("sweep/"):
        times = {"kernel": 4.2 * one}
        row["failed"] = {"materialized": "out of memory"}
    if name == "ignored":
        times = {"ignored_0": 4.2 * one, "ignored_90": 0.5 * one}
    if name == "options":
        times = {"plain": 4.2 * one} | {option: 4.2 * one * (cost - 0.01) for option, cost in bars.OPTION_COSTS.items()}
        times |= {f"single_pass/{option}": 0.75 * ms for option, ms in times.items()}
    if name == "host":
        row["samples_us"] = {"step": [250.0] * 9}
    elif name.startswith("error/"):
        row["recompute"] = {"loss": 1e-6, "de": 2.7e-3, "dc": 2.5e-3}
        row["single_pass"] = {"loss": 1e-6, "de": 1.7e-3, "dc": 2.1e-3}
    else:
        row["samples_ms"] = {step: [0.99 * ms, ms, ms, ms, 1.2 * ms] for step, ms in times.items()}
    used = {"before": 10**9, "gradients": 10**9}
    row["bytes"] = {
        "step": used | {"peak": 2 * 10**9 + 300 * bars.MIB},
        "forward": {"before": 10**9, "gradients": 0, "peak": 10**9 + shape.n * shape.v // 100},
    }
    return row


@pytest.fixture
def evidence():
    part = {
        "device": "NVIDIA H200", "driver": "580", "torch": "2.11", "triton": "3.6", "date": "2026", "seconds": 100.0,
        "module": f"_cut_cross_entropy_cuda_{SHA[:7]}",
    }  # fmt: skip
    clean = {"findings": 0, "cases": ["plain"], "launches": dict.fromkeys(KERNELS, 3)}
    return copy.deepcopy(
        {
            "torch_ext_sha256": SHA,
            "parts": {
                "correctness": part | {"tests": {node: {"outcome": "passed", "seconds": 1.0} for node in NODES}},
                "sanitize": part
                | {"runs": dict.fromkeys(("memcheck", "racecheck", "initcheck"), clean) | {"planted": {"found": True}}},
                "fuzz": part | {"examples": 20_000, "seeds": [0, 20_000], "launches": 10**5, "failures": []},
                "bench": part | {"rows": {name: bench_row(name, shape) for name, shape in SIZES.items()}},
            },
        }
    )


def test_good_evidence_has_no_problem(evidence):
    assert check(json.loads(json.dumps(evidence)), SHA, NODES) == []


def rows(evidence):
    return evidence["parts"]["bench"]["rows"]


def recorded(evidence):
    return evidence["parts"]["correctness"]["tests"]


def runs(evidence):
    return evidence["parts"]["sanitize"]["runs"]


def slower(row, step, factor):
    row["samples_ms"][step] = [factor * x for x in row["samples_ms"][step]]


BAD = {
    "other sources": (lambda x: x.update(torch_ext_sha256="f" * 64), "the present ones are"),
    "no bench": (lambda x: x["parts"].pop("bench"), "part bench: not recorded"),
    "other card": (lambda x: x["parts"]["bench"].update(device="NVIDIA A100"), "ran on NVIDIA A100"),
    "no driver": (lambda x: x["parts"]["bench"].update(driver=None), "driver is not recorded"),
    "torch backend": (lambda x: x["parts"]["correctness"].update(module="_cut_cross_entropy_cpu_0123456"), "loaded"),
    "raised": (lambda x: x["parts"]["bench"].update(failed={"host": "OSError: x"}), "part bench: {'host': 'OSError"),
    "killed part": (lambda x: x["parts"]["sanitize"].pop("seconds"), "did not finish"),
    "missing node": (
        lambda x: recorded(x).pop(NODE),
        "test not recorded: tests/gpu/test_a.py",
    ),
    "extra node": (lambda x: recorded(x).update(z={"outcome": "passed"}), "recorded but not in tests/gpu: z"),
    "failed test": (lambda x: recorded(x)[NODE].update(outcome="failed"), "test failed:"),
    "skipped test": (lambda x: recorded(x)[NODE].update(outcome="skipped"), "test skipped:"),
    "memcheck": (lambda x: runs(x)["memcheck"].update(findings=2), "memcheck: 2 findings"),
    "no racecheck": (lambda x: runs(x).pop("racecheck"), "racecheck: no findings, 0"),
    "a kernel unseen": (lambda x: runs(x)["memcheck"]["launches"].pop("fold_kernel"), "under it: fold_kernel"),
    "nothing ran": (lambda x: runs(x)["racecheck"].update(launches={}), "racecheck: no case ran"),
    "initcheck": (lambda x: runs(x)["initcheck"].update(findings=1), "initcheck: 1 findings"),
    "no fuzz": (lambda x: x["parts"].pop("fuzz"), "part fuzz: not recorded"),
    "few examples": (lambda x: x["parts"]["fuzz"].update(examples=19_999), "fuzz: 19999 examples ran"),
    "fuzz elsewhere": (lambda x: x["parts"]["fuzz"].update(launches=0), "no Triton kernel was launched"),
    "fuzz failed": (lambda x: x["parts"]["fuzz"]["failures"].append({"seed": 7, "error": "de: x"}), "seed 7 failed"),
    "costly option": (lambda x: slower(rows(x)["options"], "softcap", 1.02), "options: softcap over the plain call"),
    "costly entropy": (lambda x: slower(rows(x)["options"], "entropy", 1.02), "options: entropy over the plain call"),
    "blind": (lambda x: runs(x)["planted"].update(found=False), "planted out-of-bounds write was not found"),
    "slow step": (lambda x: slower(rows(x)["llama3-8b"], "step", 1.05), "forward and backward over the 8 N V D floor"),
    "slow forward": (lambda x: slower(rows(x)["odd"], "forward", 1.05), "odd: forward over its GEMM"),
    "slow floor": (lambda x: [slower(rows(x)["wide"], s, 1.1) for s in ("z", "de", "dc")], "wide: TF/s of the floor"),
    "memory": (lambda x: rows(x)["gemma2-2b"]["bytes"]["step"].update(peak=2 * 10**9 + 321 * bars.MIB), "320: 321"),
    "host": (lambda x: rows(x)["host"].update(samples_us={"step": [301.0] * 9}), "microseconds on the host"),
    "error": (lambda x: rows(x)["error/gemma2-2b"]["recompute"].update(dc=3e-3), "relative error of dc"),
    "NaN": (lambda x: rows(x)["error/gemma2-2b"]["single_pass"].update(de=float("nan")), "relative error of de"),
    "ignored": (lambda x: slower(rows(x)["ignored"], "ignored_90", 1.4), "90 % ignored over none"),
    "no sample": (lambda x: rows(x)["small"]["samples_ms"].pop("step"), "small: forward and backward"),
    "few samples": (lambda x: rows(x)["small"]["samples_ms"].update(z=[1.0]), "small: z needs 5 samples"),
    "no row": (lambda x: rows(x).pop("sweep/1024"), "sweep/1024: not measured"),
    "other size": (lambda x: rows(x)["wide"].update(n=1024), "wide: measured at [1024"),
    "other budget": (lambda x: rows(x)["wide"].update(budget=2**34), "wide: workspace was"),
    "did not run": (lambda x: rows(x)["sweep/131072"]["samples_ms"].clear(), "the kernel did not run"),
    "no limit shown": (lambda x: rows(x)["sweep/131072"].update(failed={}), "did not run out of memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_evidence_is_named(evidence, name):
    spoil, message = BAD[name]
    spoil(evidence)
    problems = check(evidence, SHA, NODES)
    assert any(message in problem for problem in problems), problems


def test_bars_cover_the_shapes():
    assert {bar.row for bar in bars.BARS} <= SIZES.keys()
    assert all(SHAPES[name].workspace == budget * bars.MIB for name, (budget, _) in bars.LARGE.items())


def test_parts_of_other_sources_are_dropped(tmp_path):
    path = tmp_path / "evidence.json"
    first = Evidence(path, "a" * 64)
    first.begin("bench", device="x")
    first.add("bench", "rows", "wide", {"n": 1})
    assert Evidence(path, "a" * 64).data["parts"]["bench"]["rows"] == {"wide": {"n": 1}}
    second = Evidence(path, "b" * 64)
    second.begin("sanitize")
    assert json.loads(path.read_text()) == {"torch_ext_sha256": "b" * 64, "parts": {"sanitize": {}}}


def test_a_part_begun_again_starts_empty(tmp_path):
    evidence = Evidence(tmp_path / "evidence.json", "a" * 64)
    evidence.begin("bench")
    evidence.add("bench", "rows", "wide", {})
    evidence.begin("bench", device="y")
    assert evidence.data["parts"]["bench"] == {"device": "y"}


class Report:
    duration = 0.5

    def __init__(self, when, outcome):
        self.when, self.outcome, self.longrepr = when, outcome, f"{when} {outcome}"


@pytest.mark.parametrize("last", ["passed", "failed"])
def test_a_failure_in_teardown_is_a_failure(last):
    entry = summary([Report("setup", "passed"), Report("call", "passed"), Report("teardown", last)])
    assert entry["outcome"] == last and entry["seconds"] == 1.5
    assert ("why" in entry) == (last == "failed")


@pytest.mark.parametrize(
    ("tool", "output", "findings"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 24 errors", 24),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("racecheck", "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 1),
        ("memcheck", "========= Error: Device not supported", None),
    ],
)
def test_sanitizer_output(tool, output, findings):
    assert parse(tool, output)["findings"] == findings


def test_a_flag_of_the_compiler_is_told_from_a_race():
    """Every read where the kernel begins and every write in its own body, whichever is named first."""
    lines = (sanitize.KERNELS / "fold.py").read_text().splitlines()
    begins = 1 + next(i for i, line in enumerate(lines) if line.startswith("def hopper_fold_kernel("))

    def report(first, at, second, other):
        access = "{} access at hopper_fold_kernel+0x190 in {}".format
        return f"========= Error: Race reported between {access(first, at)}\n=========     and {access(second, other)}"

    kernel, body, partition = (f"fold.py:{line}" for line in (begins, begins + 22, begins - 22))
    flags = [report("Read", kernel, "Write", body), report("Write", kernel, "Read", kernel)]
    races = [report("Read", body, "Write", kernel), report("Write", kernel, "Read", partition)]
    races += [report("Read", kernel, "Write", partition), report("Write", "pipeline.py:177", "Read", kernel)]
    summary = "========= RACECHECK SUMMARY: 6 hazards displayed (6 errors, 0 warnings)"
    found = parse("racecheck", sanitize.SEPARATOR.join([*flags, *races, summary]))
    assert found["findings"] == len(races)
    assert all(race in found["output"] for race in races) and not any(flag in found["output"] for flag in flags)


def test_gpu_tests_are_collected_without_a_gpu():
    assert any(node.startswith("tests/gpu/test_contract.py::test_bf16[") for node in collected())


@pytest.fixture
def bench_part(evidence):
    part = evidence["parts"]["bench"]
    part["memory_bytes"] = 140 << 30
    for name, row in part["rows"].items():
        if name.startswith("sweep/"):
            used = {"before": 2**30, "gradients": 2**29, "peak": 2**31 + 2**15 * row["n"]}
            row["bytes"] = {"kernel": used, "materialized": used}
            row["failed"] = {"materialized": "out of memory"} if row["n"] == 131072 else {}
            row["samples_ms"]["materialized"] = row["samples_ms"]["kernel"]
        if name.startswith("error/"):
            row["materialized_bf16"] = row["recompute"]
    ignored = part["rows"]["ignored"]["samples_ms"]
    ignored |= {"ignored_10": ignored["ignored_0"], "ignored_50": ignored["ignored_90"]}
    part["rows"]["host"] |= {"device_operations": 20, "triton_launches": {"fold": 1}}
    return part


def test_measured_tables_are_filled_and_stay_filled(bench_part):
    text = "before\n" + "".join(f"<!-- measured:{name} -->\nold\n<!-- /measured -->\n" for name in figures.TABLES)
    filled = figures.fill(text, bench_part)
    assert "old" not in filled and filled.startswith("before\n")
    assert figures.fill(filled, bench_part) == filled
    assert "| 131,072 |" in filled and "out of memory" in filled
    assert "| llama3-8b | 8,192 | 128,256 | 4,096 |" in filled and "| 1.050 |" in filled


def test_an_unknown_table_is_an_error(bench_part):
    with pytest.raises(ValueError, match="measured:typo: unknown, accepted are"):
        figures.fill("<!-- measured:typo -->\n<!-- /measured -->", bench_part)


def test_figure_is_drawn(bench_part, tmp_path):
    pytest.importorskip("matplotlib")
    figures.draw(bench_part, tmp_path / "figures" / "sweep.png")
    assert (tmp_path / "figures" / "sweep.png").stat().st_size > 10_000


@pytest.mark.skipif(not RESULTS.exists(), reason="no GPU evidence recorded yet")
def test_readme_shows_what_was_recorded():
    part = json.loads(RESULTS.read_text())["parts"].get("bench")
    if part is None or len(part["rows"]) < len(SIZES):
        pytest.skip("the bench part is not complete")
    assert figures.fill(figures.README.read_text(), part) == figures.README.read_text()
