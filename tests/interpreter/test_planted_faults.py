"""The tests would notice: each small fault that is planted in a copy of the sources is found by a small check."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted import FAULTS

NAMES = ["no fault", *FAULTS]


def test_there_are_enough_faults():
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=["even", "odd"])
def test_faults_are_found_and_nothing_else(names, tmp_path):
    """A process for every second copy: one that dies says after which."""
    script = Path(__file__).with_name("planted.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    verdicts = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert result.returncode == 0, f"died after {verdicts[-1:]}:\n{result.stderr[-2000:]}"
    assert [name for name, *_ in verdicts] == names
    wrong = [verdict for verdict in verdicts if verdict[1] != ("not found" if verdict[0] == "no fault" else "found")]
    assert not wrong, wrong
