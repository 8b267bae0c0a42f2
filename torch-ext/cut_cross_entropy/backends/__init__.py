"""Two providers of the same primitives: Triton kernels for CUDA and ROCm, plain torch operations for the rest.

| primitive      | reads                            | writes                                                     |
|----------------|----------------------------------|------------------------------------------------------------|
| select         | targets                          | the rows, valid ones first, their count; checks the range  |
| fold           | e, c, bias, targets              | per row: loss, offset and sum of exponentials, options     |
| compact        | e, rows                          | the valid rows, contiguous                                 |
| dlogits        | e, c[panel], row state, upstream | the panel of gradients with respect to the logits          |
| contract_c     | panel, e                         | dC[panel], dbias[panel], one plain write each              |
| accumulate     | two matrices                     | their product, added to a sum over panels or blocks        |
| expand         | accumulator, rows                | dE in its own dtype, 0 at ignored rows                     |

`single_pass` besides:

| Blocks         | e, targets, rows                 | so many listed rows at a time, a problem of their own      |
| exponentials   | e, c, bias, targets, weights     | the panel, and a factor per row: dz = factor * panel       |
| column_sum     | a matrix, weights of its rows    | their weighted sum in fp32                                 |
| expand_block   | fp32 rows of dE, factors         | factor * row in the dtype of dE                            |
| write_rows     | a sum for dC, two vectors        | less their outer product, in the dtype of dC               |
| scale          | gradients, upstream              | their product in place                                     |

and where it sums dC over blocks in 16 bits, which plain torch operations never do:

| write_rows     | ids besides                      | those rows of dC                                           |
| take_targets   | a panel, targets, factors        | its entries at the targets: 0, and by a second call again  |
| add_targets    | e, targets, what was taken       | their part of dC                                           |
"""

import os
import sys
import warnings

from . import torch as torch_backend

try:
    from triton.tools import tensor_descriptor  # noqa: F401  Triton 3.4 and up
except ImportError as error:
    found = getattr(sys.modules.get("triton"), "__version__", "none")
    triton_backend, TRITON_MISSING = None, f"Triton >= 3.4 is needed, found {found} ({error})"
else:
    from . import triton as triton_backend

# Triton fixes this when a kernel is decorated; under it the kernels run on CPU tensors, in NumPy.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def backend_of(device):
    """The module whose primitives run on tensors of this device.

    Raises:
        ImportError: the interpreter is asked for and Triton is absent or too old. CUDA tensors then run on the torch
            backend, with one warning.
    """
    if device.type != "cuda" and not _INTERPRETED:
        return torch_backend
    if triton_backend is not None:
        return triton_backend
    if _INTERPRETED:
        raise ImportError(TRITON_MISSING)
    warnings.warn(f"{TRITON_MISSING}. The plain torch backend is used instead.", RuntimeWarning, stacklevel=2)
    return torch_backend
