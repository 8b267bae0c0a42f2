"""What needs a process of its own: device assertions, which end the CUDA context, and first calls."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .child import REPO

pytestmark = [pytest.mark.cuda_only, pytest.mark.children]
CHILD = Path(__file__).with_name("child.py")


def start(built, *arguments, **env):
    env = {**os.environ, "LOCAL_KERNELS": f"{REPO}={built}", "HF_HUB_OFFLINE": "1", **env}
    command = [sys.executable, "-X", "faulthandler", str(CHILD), *arguments]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.parametrize("target", ["-1", "2003"])
def test_target_out_of_range_is_a_device_assertion(built, target):
    code, out, err = finish(start(built, "target", target))
    assert out and json.loads(out.splitlines()[0])["launches"] > 0, err[-2000:]
    assert "no assertion" not in out
    assert code != 0 and "assert" in err.lower(), err[-2000:]


def test_first_call_with_an_empty_cache_equals_the_second(built, tmp_path):
    """Eight fresh processes that share an empty cache, and one more: every call of all gives the same bits."""
    processes = [start(built, "first-call", TRITON_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    processes.append(start(built, "first-call"))
    results = []
    for process in processes:
        code, out, err = finish(process)
        assert code == 0, err[-2000:]
        results.append(json.loads(out.splitlines()[-1]))
    assert all(result["launches"] > 0 for result in results)
    assert len({d for result in results for d in result["digests"]}) == 1, results
