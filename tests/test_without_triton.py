"""Triton absent or too old: plain torch operations take its place, and asking for Triton says what was found."""

import json
import os
import subprocess
import sys

import pytest

ABSENT_OR_OLD = pytest.mark.parametrize(
    "old, found", [(False, "found none"), (True, "found 3.1.0")], ids=["absent", "old"]
)
SCRIPT = """
import json, sys, warnings
from pathlib import Path

if {old}:
    import triton.tools
    triton.__version__ = "3.1.0"
    sys.modules["triton.tools.tensor_descriptor"] = None
    vars(triton.tools).pop("tensor_descriptor", None)
else:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules["triton"] = None

import torch
from kernels import get_local_kernel

cce = get_local_kernel(Path(sys.argv[1]) / "build", backend="cpu")
e, c = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
found = {{}}
try:
    loss = cce.linear_cross_entropy(e, c, torch.arange(5))
    loss.backward()
    want = torch.nn.functional.cross_entropy(e.detach() @ c.detach().T, torch.arange(5))
    found["error"] = abs(loss.item() - want.item())
except ImportError as error:
    found["refused"] = str(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["backend"] = cce.backends.backend_of(torch.device("cuda")).NAME if not found.get("refused") else None
found["warned"] = [str(warning.message) for warning in caught]
print(json.dumps(found))
"""


def run_without(built, old, **env):
    command = [sys.executable, "-c", SCRIPT.format(old=old), str(built)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@ABSENT_OR_OLD
def test_the_torch_backend_works(built, old, found):
    outcome = run_without(built, old)
    assert outcome["error"] < 1e-6
    # On a CUDA device, where Triton would be used, one warning says why it is not.
    assert outcome["backend"] == "torch"
    (message,) = outcome["warned"]
    assert "Triton >= 3.4 is needed" in message and found in message and "plain torch backend" in message


@ABSENT_OR_OLD
def test_asking_for_triton_says_what_is_needed(built, old, found):
    message = run_without(built, old, TRITON_INTERPRET="1")["refused"]
    assert "Triton >= 3.4 is needed" in message and found in message
