"""A user's process: the real `kernels` and `huggingface_hub`, pointed at the loopback Hub, with its own cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

PRELUDE = """
import json, sys
import torch
from kernels import get_kernel

answer = {}

def step(kernel, reference=True):
    \"\"\"One forward and backward; the loss, which must be that of the materialized logits.\"\"\"
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(7, 8, generator=generator).requires_grad_()
    c = torch.randn(13, 8, generator=generator).requires_grad_()
    targets = torch.tensor([0, 1, 12, -100, 5, 5, 3])
    loss = kernel.linear_cross_entropy(e, c, targets)
    got = torch.autograd.grad(loss, (e, c))
    want_loss = torch.nn.functional.cross_entropy(e @ c.T, targets)
    if reference:
        torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
        for gradient, want in zip(got, torch.autograd.grad(want_loss, (e, c))):
            torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)
    return float(loss / want_loss)

def refused(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
"""


def user(url: str, home: Path, script: str, **environment: str) -> dict:
    """Run `script` as a user with the cache `home`; what it put into `answer`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCAL_KERNELS", "TRITON"))}
    env |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    code = f"{PRELUDE}\n{script}\nprint('ANSWER', json.dumps(answer))"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    shown, _, answer = run.stdout.rpartition("ANSWER ")
    return {"shown": shown, "log": run.stderr, **json.loads(answer)}
