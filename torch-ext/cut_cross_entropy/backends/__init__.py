"""Two providers of the same primitives: Triton kernels for CUDA and ROCm, plain torch operations for the rest.

| primitive    | reads                            | writes                                                     |
|--------------|----------------------------------|------------------------------------------------------------|
| select       | targets                          | the valid rows in order and their count; checks the range  |
| fold         | e, c, bias, targets              | per row: max, log-sum of exponentials, what options need   |
| compact      | e, rows                          | the valid rows, contiguous                                 |
| dlogits      | e, c[panel], row state, upstream | the panel of gradients with respect to the logits          |
| contract_c   | panel, e                         | dC[panel], dbias[panel], one plain write each              |
| contract_e   | panel, c[panel]                  | dE accumulator, fp32                                       |
| expand       | accumulator, rows                | dE in its own dtype, 0 at ignored rows                     |
"""

import os

from . import torch as torch_backend

try:
    from . import triton as triton_backend

    TRITON_MISSING = None
except ImportError as error:
    triton_backend, TRITON_MISSING = None, error

# Triton fixes this when a kernel is decorated; under it the kernels run on CPU tensors, in NumPy.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def backend_of(device):
    """The module whose primitives run on tensors of this device."""
    if triton_backend is not None and (device.type == "cuda" or _INTERPRETED):
        return triton_backend
    return torch_backend
