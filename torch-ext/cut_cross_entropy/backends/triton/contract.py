"""The contractions of a panel: GEMMs over aligned extents with fp32 accumulators, by cuBLAS, or of few tokens by a
kernel of specialised warps; and its column sums.
"""

import torch

from . import configs, hopper
from .column_sum import column_sum
from .launch import cdiv, launch


def _product(a, b, out, row=None):
    """out = a @ b in fp32 from 16-bit operands. A CPU (the interpreter) has no such GEMM and widens them first.

    A row is added to each row before it is rounded.
    """
    if row is not None:
        return torch.addmm(row.to(a.dtype), a, b, out=out)
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def contract_c(panel, e, dc, dbias, unit, row=None):
    """dC[panel] = panel.T @ e, + row in each of its rows, one plain write from an fp32 accumulator; dbias[panel] = the
    sum of its rows.
    """
    if dc is not None:
        if unit is None:
            _product(panel.t(), e, dc, row)
        else:
            wide = _product(panel.t(), e, torch.empty(dc.shape, dtype=torch.float32, device=dc.device))
            dc.copy_(wide.div_(unit))
    if dbias is not None:
        total = column_sum(panel)
        dbias.copy_(total if unit is None else total.div_(unit))


def accumulate(a, b, accumulator, first, row=None):
    """accumulator (+)= a @ b: in fp32 throughout, rounded on the way out where the accumulator has 16 bits.

    With the first product a row may be added to each of its rows.
    """
    if first:
        _product(a, b, accumulator, row)
    elif _is_short(a.t(), b, accumulator):
        # Multiples of 128 rows, so that there are few kernels to compile: those past the end are read as zeros.
        device, steps = accumulator.device, 2 * cdiv(b.shape[0], 128)
        operands = hopper.accumulate_operands(a.t(), b, accumulator)
        programs = configs.processors_of(device)
        launch(hopper.accumulate_kernel, programs, device, *operands, *accumulator.shape, STEPS=steps)
    elif accumulator.dtype == a.dtype:
        accumulator.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(accumulator, a, b, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.addmm_(a.float(), b.float())


def _is_short(panel, e, out):
    """Whether out += panel.T @ e, in 16 bits, is of so few rows, and of a device and layout, that a kernel does it."""
    alike = panel.dtype == out.dtype and panel.stride(1) == 1
    return alike and configs.specialised(panel, e, out) and e.shape[0] <= hopper.MOST_ROWS
