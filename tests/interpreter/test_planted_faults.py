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
    """One process for all copies: what was found in each, by name."""
    script = Path(__file__).with_name("planted.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("planted"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert result.returncode == 0, f"after {[name for name, _ in lines]}:\n{result.stderr[-4000:]}"
    return dict(lines)


def test_there_are_enough_faults():
    assert len(FAULTS) >= 10


def test_the_sources_as_they_are_pass_every_check(verdicts):
    assert verdicts["no fault"] is None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(verdicts, fault):
    assert verdicts[fault] is not None
