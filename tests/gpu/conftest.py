"""Every test here runs on a CUDA device, on memory full of NaN, and shows that Triton kernels were launched.

CCE_TEST_DEVICE=cpu is a developer's dry run of the test code itself: small sizes, the torch backend, no such claim.
"""

import gc
import importlib
import os

import pytest
import torch

DEVICE = os.environ.get("CCE_TEST_DEVICE", "cuda")
MARKERS = {
    "large": "needs tens of GiB of device memory: not beside other tests",
    "cuda_only": "uses CUDA itself: not part of a dry run on a CPU",
    "nothing_to_compute": "no kernel needs to be launched",
    "children": "kernels are launched, and counted, in child processes",
}
GIB = 1 << 30


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def poison(gib: int) -> None:
    """Leave the caching allocator with blocks whose bytes are all 0xFF: NaN in bf16, fp16, fp32 and fp64."""
    gc.collect()
    torch.cuda.empty_cache()
    blocks = [torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")]
    # Requests of at most 1 MiB are served from a pool of their own.
    blocks += [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for block in blocks:
        block.fill_(0xFF)


@pytest.fixture(autouse=True)
def gpu(request):
    """Poisoned memory before the test; after it, the launch counter must have grown."""
    marked = {name for name in MARKERS if request.node.get_closest_marker(name)}
    if DEVICE != "cuda":
        if "cuda_only" in marked:
            pytest.skip("dry run on a CPU")
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cce = request.getfixturevalue("cce")
    launches = importlib.import_module(f"{cce.__name__}.backends.triton").launches
    poison(24 if "large" in marked else 1)
    before = launches.total()
    yield
    torch.cuda.synchronize()
    if not marked & {"nothing_to_compute", "children"}:
        assert launches.total() > before, "no Triton kernel was launched"
