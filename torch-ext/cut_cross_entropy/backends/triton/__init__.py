"""The primitives as Triton kernels, for CUDA (compute capability 8.0 and up) and ROCm."""

from .column_sum import column_sum
from .contract import accumulate, contract_c
from .dlogits import dlogits, new_panel, panel_unit
from .exponentials import exponentials, factors
from .fold import fold, folds_all_rows
from .launch import launches
from .offsets import Blocks
from .rows import (
    compact,
    count_later,
    expand,
    expand_block,
    new_rows,
    reads_count,
    scale,
    scale_rows,
    select,
    write_rows,
)
from .targets import add_targets, take_targets

NAME = "triton"

__all__ = [
    "NAME", "Blocks", "accumulate", "add_targets", "column_sum", "compact", "contract_c", "count_later",
    "dlogits", "expand", "expand_block", "exponentials", "factors", "fold", "folds_all_rows", "launches", "new_panel",
    "new_rows", "panel_unit", "reads_count", "scale", "scale_rows", "select", "take_targets", "write_rows",
]  # fmt: skip
