"""The kernel under test is loaded as its users load it: freshly built, through `kernels.get_kernel`."""

import os
from pathlib import Path

# Read when huggingface_hub is imported: no test may reach a real Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tools.build import build  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores between them.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def repo():
    """The Hub repository that build.toml names."""
    return "org/cut-cross-entropy"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A folder with build/torch-<backend>: CCE_BUILT, or one per pytest process made from the present sources."""
    if "CCE_BUILT" in os.environ:
        return Path(os.environ["CCE_BUILT"])
    root = tmp_path_factory.mktemp("kernel")
    build(out=root / "build")
    return root


@pytest.fixture(scope="session")
def cce(built, repo):
    """The loaded kernel module."""
    from kernels import get_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{repo}={built}")
        return get_kernel(repo, version=1, trust_remote_code=[repo])
