"""The sum of the rows of a matrix, in fp32 and in a fixed order: of a panel the gradient of the bias, of c what label
smoothing needs.

Reads the matrix once; writes and reads `parts` partial sums of a row, some 512 bytes for each program.
"""

import torch
import triton
import triton.language as tl

from . import configs
from .launch import cdiv, launch

ROWS, COLUMNS = 32, 128  # of a tile
PROGRAMS = 4  # per multiprocessor: enough loads in flight for the full bandwidth


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(
    matrix,  # [rows, columns]
    weight,  # [rows]
    out,  # [parts, columns]
    rows, columns, stride,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[i] = the part i of sum_r weight_r matrix_r; as many programs per block of columns as parts."""
    blocks = tl.cdiv(columns, COLUMNS)
    part, parts = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    o_c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    # Rows of a tile meet at the end alone, and the next tiles are on their way: what is left to wait for is memory.
    b_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for i_r in tl.range(part * ROWS, rows, parts * ROWS, num_stages=3):
        o_r = i_r + tl.arange(0, ROWS)
        m_x = (o_r < rows)[:, None] & (o_c < columns)[None, :]
        b_x = tl.load(matrix + o_r.to(tl.int64)[:, None] * stride + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            b_x *= tl.load(weight + o_r, mask=o_r < rows, other=0.0).to(tl.float32)[:, None]
        b_sum += b_x
    tl.store(out + part * columns + o_c, tl.sum(b_sum, 0), mask=o_c < columns)


def column_sum(matrix, weight=None):
    """sum_r weight_r matrix_r, fp32 [columns], of a matrix with contiguous rows; the weights default to 1."""
    (rows, columns), device = matrix.shape, matrix.device
    blocks = cdiv(columns, COLUMNS)
    parts = min(cdiv(PROGRAMS * configs.processors_of(device), blocks), cdiv(rows, ROWS))
    sums = torch.empty((parts, columns), dtype=torch.float32, device=device)
    launch(
        column_sum_kernel, parts * blocks, device, matrix, weight, sums, rows, columns, matrix.stride(0),
        HAS_WEIGHT=weight is not None, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0)
