"""The tests would notice: each small fault that is planted in a copy of the sources is found by a small check."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted import FAULTS

pytestmark = pytest.mark.xdist_group("planted faults")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """One process for all copies: name -> (how far it got, what was found)."""
    script = Path(__file__).with_name("planted.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path_factory.mktemp("planted"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert result.returncode == 0, f"died after {lines[-1:]}:\n{result.stderr[-2000:]}"
    return {name: (stage, found) for name, stage, found in lines}


def test_there_are_enough_faults():
    assert len(FAULTS) >= 10


def test_the_sources_as_they_are_pass_every_check(verdicts):
    assert verdicts["no fault"] == ("not found", None)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(verdicts, fault):
    stage, found = verdicts[fault]
    assert stage == "found", found
