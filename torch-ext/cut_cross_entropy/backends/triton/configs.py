"""Tile shapes: one table, by architecture class. Nothing here is measured at run time or asked of a driver at import.

Shared memory per block bounds stages * (BM + BN) * BK * itemsize (plus the stored tile where a descriptor stores it):
163 KB on 8.0, 99 KB on 8.6, 8.9 and 12.0, 227 KB on 9.0 and 10.0, 64 KB on gfx9.
"""

import functools
import os
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """BM tokens by BN columns, BK of the hidden size at a time."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


class Config(NamedTuple):
    """`fold` and `dlogits` multiply the same operands and differ in their epilogues.

    `heavy` leaves the online fold of label smoothing and a large softcap the registers that a larger accumulator would
    make them spill, `pointers` does so for the addresses of rows that are not aligned; `fp32` is IEEE arithmetic.
    `specialised` devices take the kernels of `hopper` where they can.
    """

    fold: Tile
    dlogits: Tile
    heavy: Tile
    fp32: Tile
    descriptors: bool
    specialised: bool = False
    pointers: Tile = Tile(128, 128, 32, 8, 3)

    def tile(self, kernel, dtype, heavy, described=True):
        """The tile of "fold" or "dlogits" for operands of a dtype, `described` where a descriptor could hold them."""
        if dtype == torch.float32:
            return self.fp32
        if not described:
            return self.pointers._replace(BN=64) if heavy else self.pointers
        return self.heavy if heavy else getattr(self, kernel)


# The kernels of `hopper` are written in Gluon, which changes with every release of Triton: they are used with those
# that compile them, and with any other the kernels of this folder do the same work.
GLUON = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
# Those that keep tiles of 192 rows in registers; later ones spill 100 to 350 bytes of them.
KEEPS_TALL = triton.__version__.startswith(("3.6.", "3.7."))

_IEEE = Tile(64, 64, 32, 4, 2)
_INTERPRETED = Tile(16, 32, 16, 1, 1)
CONFIGS = {
    # Accumulators in tensor memory pass through registers whole: 128 x 256 spills there.
    "sm100": Config(*[Tile(128, 128, 64, 8, 4)] * 2, Tile(128, 64, 64, 8, 4), _IEEE, True),
    # 128 x 256 x 64 with descriptors runs at the speed of cuBLAS; 128 x 128 loses 15 to 30 %.
    "sm90": Config(Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), _IEEE, True, GLUON),
    "sm80": Config(*[Tile(128, 128, 64, 8, 3)] * 3, _IEEE, False),
    "sm86": Config(*[Tile(128, 128, 32, 8, 3)] * 2, Tile(128, 64, 32, 8, 3), _IEEE, False),
    "gfx9": Config(*[Tile(128, 128, 32, 8, 2)] * 3, _IEEE, False, pointers=Tile(128, 128, 32, 8, 2)),
    "interpreter": Config(*[_INTERPRETED] * 4, True, pointers=_INTERPRETED),
}

# Row blocks that share a classifier tile in L2 while they are in flight.
GROUP = 16
# The forward runs over all rows while at least DENSE / 8 of them are valid, and over the list of valid rows below that.
DENSE = 7
# Below this many multiplications in a pass, a few tenths of a millisecond, skipping ignored rows would cost more in
# launches and in waiting for their count than it saves.
SMALL = 75 * 10**9


def architecture(capability, hip=False):
    """The row of CONFIGS for a compute capability."""
    if hip:
        return "gfx9"
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        raise RuntimeError(f"compute capability {found} is below 8.0, the least that is supported")
    if capability[0] in (9, 10, 11):
        return "sm90" if capability[0] == 9 else "sm100"
    return "sm80" if capability in ((8, 0), (8, 7)) else "sm86"


@functools.cache
def config_of(device):
    if os.environ.get("TRITON_INTERPRET") == "1":
        return CONFIGS["interpreter"]
    return CONFIGS[architecture(torch.cuda.get_device_capability(device), torch.version.hip is not None)]


@functools.cache
def processors_of(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def is_small(n, v, d, device):
    return device.type == "cuda" and n * v * d < SMALL


def describable(t):
    """A tensor descriptor needs a 16-byte aligned base and row stride, and contiguous columns."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == 1


def operand(t, rows, columns, config):
    """What a kernel gets of a matrix: a descriptor of [rows, columns] blocks where the device and layout allow it."""
    if config.descriptors and describable(t) and t.dtype != torch.float32:
        return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns]), True
    return t, False


def specialised(*operands):
    """Whether the kernels of `hopper` take these operands."""
    return config_of(operands[0].device).specialised and all(
        describable(t) and t.dtype != torch.float32 for t in operands
    )


def precision_of(dtype):
    """fp32 products are IEEE unless the matmul setting of torch in force allows TF32."""
    if dtype != torch.float32 or not torch.cuda.is_available():
        return "ieee"
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):  # torch 2.8
        return "tf32" if matmul.allow_tf32 else "ieee"
    setting = matmul.fp32_precision
    if setting == "none":  # as set for all operations
        setting = torch.backends.fp32_precision
    return "tf32" if setting == "tf32" else "ieee"
