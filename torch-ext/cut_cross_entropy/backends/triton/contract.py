"""The contractions of a panel, by cuBLAS: GEMMs over aligned extents with fp32 accumulators; and its column sums."""

import torch

from .column_sum import column_sum


def _product(a, b, out):
    """out = a @ b in fp32 from 16-bit operands. A CPU (the interpreter) has no such GEMM and widens them first."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def contract_c(panel, e, dc, dbias, unit):
    """dC[panel] = panel.T @ e, one plain write from an fp32 accumulator; dbias[panel] = the sum of its rows."""
    if dc is not None:
        if unit is None and (dc.is_cuda or dc.dtype == torch.float32):
            torch.mm(panel.t(), e, out=dc)
        else:
            wide = _product(panel.t(), e, torch.empty(dc.shape, dtype=torch.float32, device=dc.device))
            dc.copy_(wide if unit is None else wide.div_(unit))
    if dbias is not None:
        total = column_sum(panel)
        dbias.copy_(total if unit is None else total.div_(unit))


def accumulate(a, b, accumulator, first):
    """accumulator (+)= a @ b: in fp32 throughout, rounded on the way out where the accumulator has 16 bits."""
    if first:
        _product(a, b, accumulator)
    elif accumulator.dtype == a.dtype:
        accumulator.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(accumulator, a, b, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.addmm_(a.float(), b.float())
