"""Hold the recorded GPU evidence to the present sources, tests and bars: `python tools/check_evidence.py [FILE]`.

It needs no GPU. It fails unless the record was made from these very sources, names exactly the tests that pytest
collects in tests/gpu with every one passed, shows every kernel clean under the sanitizers and a planted fault found,
20,000 drawn calls within the contract, and reaches every bar of benchmarks/bars.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import bars  # noqa: E402
from benchmarks.evidence import RESULTS  # noqa: E402
from benchmarks.shapes import HELD, HOST, OPTIONS, SHAPES, SWEEP  # noqa: E402
from tools.source_hash import torch_ext_sha256  # noqa: E402

PARTS = ("correctness", "sanitize", "fuzz", "bench")
ENVIRONMENT = ("device", "driver", "torch", "triton", "date", "module")
CARD = "H200"  # what the bars are for
LEAST_SAMPLES = 5
LEAST_EXAMPLES = 20_000
PART_SECONDS = 600
SIZES = SHAPES | {"ignored": SHAPES["llama3-8b"], "options": OPTIONS, "host": HOST}
SIZES |= {f"error/{name}": shape for name, (shape, _) in HELD.items()}
SIZES |= {f"sweep/{shape.n}": shape for shape in SWEEP}
NO_BUDGET = ("ignored", "host")
KERNELS = {
    name
    for path in (ROOT / "torch-ext/cut_cross_entropy/backends/triton").rglob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}


def collected() -> set[str]:
    """Node ids of tests/gpu. Collection imports the tests and touches no device."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    env = {k: x for k, x in os.environ.items() if k != "CCE_TEST_DEVICE"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pytest could not collect tests/gpu:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {line.strip() for line in done.stdout.splitlines() if "::" in line}


def check(evidence: dict, sha256: str, nodes: set[str]) -> list[str]:
    """What is wrong with the evidence, in words; empty if nothing is."""
    if evidence.get("torch_ext_sha256") != sha256:
        return [f"sources: recorded from {evidence.get('torch_ext_sha256')}, the present ones are {sha256}"]
    parts = evidence.get("parts", {})
    problems = [f"part {name}: not recorded" for name in PARTS if name not in parts]
    for name in (name for name in PARTS if name in parts):
        problems += check_environment(name, parts[name], sha256)
    problems += check_tests(parts.get("correctness", {}).get("tests", {}), nodes)
    problems += check_sanitizer(parts.get("sanitize", {}).get("runs", {}))
    problems += check_fuzz(parts.get("fuzz", {}))
    return problems + check_bench(parts.get("bench", {}).get("rows", {}))


def check_environment(name: str, part: dict, sha256: str) -> list[str]:
    problems = [f"part {name}: {key} is not recorded" for key in ENVIRONMENT if not part.get(key)]
    if CARD not in str(part.get("device")):
        problems.append(f"part {name}: ran on {part.get('device')}, the bars are for an {CARD}")
    if part.get("failed"):
        problems.append(f"part {name}: {part['failed']}")
    wanted = f"_cut_cross_entropy_cuda_{sha256[:7]}"
    if part.get("module") != wanted:
        problems.append(f"part {name}: loaded {part.get('module')}, the build of these sources is {wanted}")
    if not 0 < part.get("seconds", math.inf) < PART_SECONDS:
        problems.append(f"part {name}: did not finish within {PART_SECONDS} s (seconds: {part.get('seconds')})")
    return problems


def check_tests(tests: dict, nodes: set[str]) -> list[str]:
    problems = [f"test not recorded: {node}" for node in sorted(nodes - tests.keys())]
    problems += [f"test recorded but not in tests/gpu: {node}" for node in sorted(tests.keys() - nodes)]
    return problems + [
        f"test {entry.get('outcome')}: {node}"
        for node, entry in sorted(tests.items())
        if entry.get("outcome") != "passed"
    ]


def check_sanitizer(runs: dict) -> list[str]:
    problems = []
    for tool in ("memcheck", "racecheck", "initcheck"):
        run = runs.get(tool, {})
        if run.get("findings") != 0:
            problems.append(f"{tool}: {run.get('findings', 'no')} findings, 0 are accepted")
        if not run.get("cases") or not run.get("launches"):
            problems.append(f"{tool}: no case ran, or no Triton kernel was launched under it")
        elif unseen := KERNELS - run["launches"].keys():
            problems.append(f"{tool}: never launched under it: {', '.join(sorted(unseen))}")
    if not runs.get("planted", {}).get("found"):
        problems.append("memcheck: the planted out-of-bounds write was not found")
    return problems


def check_fuzz(part: dict) -> list[str]:
    problems = []
    if not part.get("examples", 0) >= LEAST_EXAMPLES:
        problems.append(f"fuzz: {part.get('examples', 'no')} examples ran, {LEAST_EXAMPLES} are wanted")
    if not part.get("seeds") or not part.get("launches"):
        problems.append("fuzz: no seeds recorded, or no Triton kernel was launched")
    if "failures" not in part:
        problems.append("fuzz: failures are not recorded")
    return problems + [
        f"fuzz: seed {failure.get('seed')} failed: {failure.get('error')}" for failure in part.get("failures", [])
    ]


def check_bench(rows: dict) -> list[str]:
    problems = []
    for name, shape in SIZES.items():
        row = rows.get(name)
        if row is None:
            problems.append(f"bench {name}: not measured")
            continue
        if [row.get(k) for k in "nvd"] != [shape.n, shape.v, shape.d]:
            problems.append(f"bench {name}: measured at {[row.get(k) for k in 'nvd']}, not at {shape}")
        if name not in NO_BUDGET and row.get("budget") != shape.workspace:
            problems.append(f"bench {name}: workspace was {row.get('budget')}, not {shape.workspace}")
        samples = row.get("samples_ms", {}) | row.get("samples_us", {})
        for step, values in samples.items():
            if len(values) < LEAST_SAMPLES or not all(math.isfinite(x) and x > 0 for x in values):
                problems.append(f"bench {name}: {step} needs {LEAST_SAMPLES} samples above 0, has {values}")
        if name.startswith("sweep/") and "kernel" not in samples:
            problems.append(f"bench {name}: the kernel did not run: {row.get('failed')}")
    last = rows.get(f"sweep/{SWEEP[-1].n}", {})
    if last and "materialized" not in last.get("failed", {}):
        problems.append(f"bench sweep: the materialized loss did not run out of memory at {SWEEP[-1].n} tokens")
    return problems + [f"bar {finding}" for finding in bars.judge(rows) if not finding.ok]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    file = parser.parse_args().file
    if not file.exists():
        print(f"{file}: not there; `make gpu` on a CUDA machine writes it", file=sys.stderr)
        return 1
    evidence = json.loads(file.read_text())
    problems = check(evidence, torch_ext_sha256(), collected())
    if problems:
        print(*problems, f"{file.name}: {len(problems)} problem(s)", sep="\n", file=sys.stderr)
        return 1
    print(*bars.judge(evidence["parts"]["bench"]["rows"]), sep="\n")
    tests = len(evidence["parts"]["correctness"]["tests"])
    examples = evidence["parts"]["fuzz"]["examples"]
    passed = f"{tests} tests and {examples} drawn calls passed, sanitizer clean, every bar reached"
    print(f"{passed}, from the present sources")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
