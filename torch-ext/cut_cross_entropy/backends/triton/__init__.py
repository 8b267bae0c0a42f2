"""The primitives as Triton kernels, for CUDA (compute capability 8.0 and up) and ROCm."""

from .contract import contract_c, contract_e
from .dlogits import dlogits, new_panel, panel_unit
from .fold import fold
from .launch import launches
from .rows import compact, count_on_host, expand, select

NAME = "triton"

__all__ = [
    "NAME", "compact", "contract_c", "contract_e", "count_on_host", "dlogits", "expand", "fold",
    "launches", "new_panel", "panel_unit", "select",
]  # fmt: skip
