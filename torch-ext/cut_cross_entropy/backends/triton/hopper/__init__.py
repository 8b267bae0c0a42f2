"""Kernels of compute capability 9.0 whose epilogues run beside the next products: specialised warps, in Gluon."""

from ..configs import GLUON

if GLUON:
    from .accumulate import MOST_ROWS, accumulate_operands  # noqa: F401
    from .accumulate import hopper_accumulate_kernel as accumulate_kernel  # noqa: F401
    from .dlogits import hopper_dlogits_kernel as dlogits_kernel  # noqa: F401
    from .fold import hopper_fold_kernel as fold_kernel  # noqa: F401
    from .online import hopper_online_kernel as online_kernel  # noqa: F401
    from .pipeline import TILE, fold_tile, operands, present  # noqa: F401
