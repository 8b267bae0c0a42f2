"""A pytest plugin (`-p benchmarks.recorder`) that puts each finished test into the evidence.

A test passed when its setup, call and teardown all did: the proof that Triton was launched is in the teardown.
Under pytest-xdist the reports of all workers arrive in the controlling process, which alone writes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.evidence import Evidence
from tools.source_hash import torch_ext_sha256

PATH = "CUT_CROSS_ENTROPY_EVIDENCE"


class Recorder:
    def __init__(self, evidence: Evidence):
        self.evidence, self.running = evidence, {}

    def pytest_runtest_logreport(self, report):
        phases = self.running.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when == "teardown":
            self.evidence.add("correctness", "tests", report.nodeid, summary(self.running.pop(report.nodeid)))


def summary(phases) -> dict:
    """Outcome over all phases, their time together, and where it failed."""
    outcomes = {report.outcome for report in phases}
    outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
    entry = {"outcome": outcome, "seconds": round(sum(report.duration for report in phases), 3)}
    if outcome != "passed":
        entry["why"] = "\n".join(str(report.longrepr) for report in phases if report.outcome != "passed")[-1500:]
    return entry


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Recorder(Evidence(Path(os.environ[PATH]), torch_ext_sha256())), "evidence")
