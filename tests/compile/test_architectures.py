"""Which row of the tile table a device gets, and that nothing asks a driver before there is a tensor."""

import importlib
import os
import subprocess
import sys

import pytest

ROWS = {
    (8, 0): "sm80", (8, 6): "sm86", (8, 7): "sm80", (8, 9): "sm86", (9, 0): "sm90",
    (10, 0): "sm100", (10, 1): "sm100", (10, 3): "sm100", (11, 0): "sm100", (12, 0): "sm86", (12, 1): "sm86",
}  # fmt: skip


@pytest.fixture
def configs(cce):
    return importlib.import_module(f"{cce.__name__}.backends.triton.configs")


@pytest.mark.parametrize("capability", ROWS, ids=lambda capability: ".".join(map(str, capability)))
def test_every_capability_has_its_row(configs, capability):
    row = configs.architecture(capability)
    assert row == ROWS[capability]
    assert row in configs.CONFIGS


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (9, 5)])
def test_rocm_has_its_row(configs, capability):
    assert configs.architecture(capability, hip=True) == "gfx9"


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_below_8_0_is_refused(configs, capability):
    found = ".".join(map(str, capability))
    with pytest.raises(RuntimeError, match=f"capability {found} is below 8.0"):
        configs.architecture(capability)


IMPORT = """
import sys, torch, triton

def refuse(*args, **kwargs):
    raise AssertionError("a driver was asked at import")

torch.cuda._lazy_init = torch.cuda.get_device_capability = torch.cuda.get_device_properties = refuse
torch.cuda.is_available = torch.cuda.device_count = refuse
type(triton.runtime.driver).active = property(refuse)
from kernels import get_kernel
known = get_kernel({repo!r}, version=1, trust_remote_code=[{repo!r}])
assert known.__name__ + ".backends.triton.configs" in sys.modules
"""


def test_no_driver_is_asked_at_import(built, repo):
    script = IMPORT.format(repo=repo)
    env = os.environ | {"LOCAL_KERNELS": f"{repo}={built}"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
