"""Run the test suites, one pytest process after another, and sum them up: `python -m tools.run_tests [SUITE ...]`.

They cannot share a process: TRITON_INTERPRET is fixed when a kernel is decorated, and a kernel decorated under it
cannot be compiled ahead of time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from tools.source_hash import ROOT


@dataclass(frozen=True)
class Suite:
    paths: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


APART = ("interpreter", "compile", "gpu")
SUITES = {
    "cpu": Suite(("tests", *(f"--ignore=tests/{name}" for name in APART))),
    "interpreter": Suite(("tests/interpreter",), {"TRITON_INTERPRET": "1"}),
    "compile": Suite(("tests/compile",)),
    # The code of the tests themselves, by the torch backend: before it costs time on a GPU.
    "dry": Suite(("tests/gpu",), {"CCE_TEST_DEVICE": "cpu"}),
}


@dataclass
class Outcome:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    returncode: int = 0

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and self.failed == 0 and self.passed > 0


def run(name: str, workers: int, scratch: Path) -> Outcome:
    """Run one suite; its output goes straight to the terminal."""
    suite = SUITES[name]
    report = scratch / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", f"--junitxml={report}", *suite.paths]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadgroup"]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | suite.env
    # Plugins of the system's Python, which .venv can see, are none of ours.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    print(f"\n== {name}: pytest {' '.join(suite.paths)}", flush=True)
    start = time.monotonic()
    returncode = subprocess.run(command, cwd=ROOT, env=env).returncode
    outcome = Outcome(seconds=time.monotonic() - start, returncode=returncode)
    if report.exists():
        counts = next(ElementTree.parse(report).iter("testsuite")).attrib
        outcome.failed = int(counts["failures"]) + int(counts["errors"])
        outcome.skipped = int(counts["skipped"])
        outcome.passed = int(counts["tests"]) - outcome.failed - outcome.skipped
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="pytest-xdist workers")
    args = parser.parse_args()
    unknown = set(args.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; accepted: {', '.join(SUITES)}")

    with tempfile.TemporaryDirectory() as scratch:
        outcomes = {name: run(name, args.workers, Path(scratch)) for name in args.suites or SUITES}

    print()
    for name, outcome in outcomes.items():
        verdict = "ok" if outcome.ok else f"FAILED (pytest exit {outcome.returncode})"
        print(
            f"{name:12s} {outcome.passed:5d} passed {outcome.failed:3d} failed {outcome.skipped:3d} skipped "
            f"{outcome.seconds:6.0f} s  {verdict}"
        )
    kinds = ("passed", "failed", "skipped")
    total = {kind: sum(getattr(outcome, kind) for outcome in outcomes.values()) for kind in kinds}
    # A suite that died before its report, or collected nothing, is one failure more.
    total["failed"] += sum(not outcome.ok and outcome.failed == 0 for outcome in outcomes.values())
    print("total: " + ", ".join(f"{count} {kind}" for kind, count in total.items()))
    return 0 if all(outcome.ok for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
