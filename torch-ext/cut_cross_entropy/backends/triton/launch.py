"""Launching a kernel: on the device of its tensors, on that device's current stream, and counted."""

from collections import Counter
from contextlib import nullcontext

import torch

# Launches by kernel name, so that a test can assert that Triton ran.
launches = Counter()


def launch(kernel, programs, device, *args, **constants):
    launches[kernel.__name__] += 1
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*args, **constants)
