"""The example in its short form, and that each of its checks can fail."""

import importlib.util
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from tools.source_hash import ROOT

SCRIPT = ROOT / "examples" / "finetune.py"
CHECKS = (
    "loss against float64, relative",
    "loss against F.cross_entropy in fp32, relative",
    "dE against float64, relative",
    "dC against float64, relative",
    "loss, last pass over first",
    "peak memory, over materialized",
)


@pytest.fixture
def demo(built, repo, monkeypatch):
    """The example as a module, on a CPU."""
    pytest.importorskip("tqdm")
    monkeypatch.setenv("LOCAL_KERNELS", f"{repo}={built}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("finetune", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "finetune", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator)
    return hidden, weight, torch.randint(50, (2, 9), generator=generator)


def failed(checks):
    return [check.what for check in checks if not check.ok]


def test_short_run(built, repo, tmp_path):
    figure = tmp_path / "demo.png"
    # Passive waiting: on shared cores, threads that spin at every barrier take the time of those they wait for.
    env = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"LOCAL_KERNELS": f"{repo}={built}"}
    if "PYTEST_XDIST_WORKER" in os.environ:
        env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(SCRIPT), "--short", "--figure", str(figure)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.findall(r"^ok   (.*?)  ", done.stdout, re.MULTILINE) == list(CHECKS)
    assert f"from {built / 'build'}" in done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_comparison_passes(demo, states):
    assert failed(demo.compare(states)) == []


@pytest.mark.parametrize("factor", [1 + 3e-5, math.nan])
def test_wrong_loss_fails_every_check_of_it(demo, states, factor, monkeypatch):
    monkeypatch.setattr(demo, "fused", lambda *inputs: demo.materialized(*inputs) * factor)
    assert failed(demo.compare(states)) == list(CHECKS[:4])


def test_wrong_gradient_fails_though_the_loss_is_right(demo, states, monkeypatch):
    def detached_head(hidden, weight, ids):
        return demo.materialized(hidden, weight.detach() + 0 * weight, ids)

    monkeypatch.setattr(demo, "fused", detached_head)
    assert failed(demo.compare(states)) == ["dC against float64, relative"]


def test_check_is_strict(demo):
    assert not demo.Check("equal", 1.0, 1.0).ok
    assert not demo.Check("nan", math.nan, 1.0).ok
    assert demo.Check("below", 0.5, 1.0).ok


def test_exit_status_follows_the_checks(demo, states, monkeypatch, tmp_path):
    """main() with the model, the training and the measurement replaced: one failing check makes it exit with 1."""
    head = torch.nn.Linear(16, 50, bias=False)
    body = torch.nn.Embedding(50, 16)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head = body, head

        def model(self, ids):
            return type("Output", (), {"last_hidden_state": self.body(ids)})

    class Tokens:
        input_ids = torch.arange(1024)[None] % 50

    monkeypatch.setattr(demo, "load_model", lambda: (Model(), lambda *args, **kwargs: Tokens))
    for ours, status in ((1, 0), (3, 1)):
        monkeypatch.setattr(demo, "peaks", lambda states, ours=ours: {"cut cross-entropy": ours, "materialized": 2})
        monkeypatch.setattr(sys, "argv", ["finetune.py", "--short", "--figure", str(tmp_path / "demo.png")])
        assert demo.main() == status
