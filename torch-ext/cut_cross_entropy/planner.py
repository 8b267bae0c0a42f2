"""From sizes and a byte budget to a plan: panel width, scratch bytes by name, floating-point operations.

Pure Python on integers. A plan depends on the sizes, the dtype, the class of device and the budget, never on what is
free on the card at the moment, so that the same call always runs the same reductions in the same order.

Two kinds of device differ in what they keep in memory:

* ``cuda`` (Triton kernels): a panel of dlogits in the dtype of the inputs, contracted by GEMMs that read 16 bits and
  accumulate in fp32. Compacted hidden states lie in the storage of dE until its rows are written at the end.
* anything else (plain torch operations): fp32 panels, fp32 copies of the 16-bit operands, one panel at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MIB = 1 << 20
SCHEDULES = ("auto", "recompute")

# Panel widths are multiples of this: the widest vocabulary tile of the kernels, and a multiple of the 64 columns that
# every GEMM extent and row stride should be divisible by.
PANEL_STEP = 256
# Per token: the fp32 vectors nll, lse, m, s and the int32 row index.
STATE_BYTES = 20
# What the default budget is at least.
DEFAULT_WORKSPACE = 64 * MIB


@dataclass(frozen=True, slots=True)
class Plan:
    """What one forward and backward pass will use.

    Attributes:
        schedule: name of the order of loops.
        panel: vocabulary columns per panel of the backward (its row stride as well).
        panels: how many panels cover the vocabulary.
        parts: scratch bytes by name; ``forward:`` parts and ``backward:`` parts are not alive together.
        flops: floating-point operations of all GEMMs.
    """

    schedule: str
    panel: int
    panels: int
    parts: Mapping[str, int]
    flops: int

    def _of(self, stage: str) -> int:
        return sum(size for name, size in self.parts.items() if name.partition(":")[0] in ("both", stage))

    @property
    def workspace(self) -> int:
        """Peak bytes over the inputs and the returned gradients."""
        return max(self._of("forward"), self._of("backward"))

    def __str__(self) -> str:
        lines = [f"{self.schedule}: {self.panels} panel(s) of {self.panel} columns, {self.flops / 1e12:.2f} TFLOP"]
        lines += [f"  {name:<24} {size / MIB:12.2f} MiB" for name, size in self.parts.items()]
        return "\n".join([*lines, f"  {'peak':<24} {self.workspace / MIB:12.2f} MiB"])


@functools.lru_cache(1024)
def forward_splits(n: int, v: int, d: int, *, block_m: int, block_n: int, processors: int) -> tuple[int, int]:
    """Vocabulary splits of the fold, over all rows and over a list of valid rows that may be a tenth of them.

    Over all rows: the fewest waves of the least idle programs. Programs in flight read up to `processors` row blocks
    side by side; more than about 40 MB of them would not stay in L2 while the vocabulary goes by.
    """
    row_blocks, tiles = -(-max(n, 1) // block_m), -(-v // block_n)
    least = min(tiles, max(1, round(min(processors, row_blocks) * block_m * d * 2 / (40 * MIB))))
    most = min(tiles, max(least, -(-4 * processors // row_blocks)))

    def cost(splits):
        return -(-row_blocks * splits // processors) * (-(-tiles // splits) + 0.5)

    every = min(range(least, most + 1), key=cost)
    # A partial takes 8 bytes a row: V / 1024 of them are 0.4 % of 16-bit logits.
    return every, min(tiles, max(every, min(-(-16 * processors // row_blocks), v // 1024)))


@functools.lru_cache(1024)
def plan(
    n: int,
    v: int,
    d: int,
    dtype,
    *,
    device: str = "cuda",
    valid: int | None = None,
    compacted: bool | None = None,
    need_de: bool = True,
    need_dc: bool = True,
    need_dbias: bool = False,
    workspace: int | None = None,
    schedule: str = "auto",
) -> Plan:
    """The plan that ``linear_cross_entropy`` follows for these sizes.

    Args:
        n, v, d: tokens, vocabulary, hidden size.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32`` (or its name).
        device: ``"cuda"`` for the Triton kernels, any other name for the plain torch backend.
        valid: tokens whose target is not ignored, where known; otherwise room is kept for any number of them.
        compacted: whether the valid rows of e are copied together; by default unless `valid` says that all are.
        need_de, need_dc, need_dbias: which gradients are wanted.
        workspace: byte budget over inputs and gradients. Default: max(64 MiB, bytes of e and c, the minimum).
        schedule: ``"auto"`` or ``"recompute"``.

    Raises:
        ValueError: the budget is below what the sizes need, or the schedule is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, accepted are {', '.join(map(repr, SCHEDULES))}")
    name = str(dtype).removeprefix("torch.")
    itemsize = {"bfloat16": 2, "float16": 2, "float32": 4}.get(name)
    if itemsize is None:
        raise TypeError(f"dtype: got {dtype}, accepted are bfloat16, float16 and float32")
    if compacted is None:
        compacted = valid is None or valid < n
    valid = n if valid is None else valid
    backward = need_de or need_dc or need_dbias
    fixed, per_column, parts = {}, {}, {"both:row state": STATE_BYTES * n}
    if device == "cuda":
        # Of a device of 132 multiprocessors, a twentieth of a percent of the logits.
        parts["forward:split partials"] = 8 * n * max(forward_splits(n, v, d, block_m=128, block_n=256, processors=132))
        if backward:
            in_place = name == "float32" and not compacted
            fixed["backward:dE accumulator"] = 4 * valid * d * (need_de and not in_place)
            fixed["backward:compacted e"] = itemsize * valid * d * (compacted and not need_de)
            per_column["backward:panel"] = itemsize * valid
            per_column["backward:fp32 dC panel"] = 4 * d * (name == "float16" and need_dc)
    else:
        widened, tile = itemsize < 4, min(v, PANEL_STEP)
        copied = 4 * valid * d * (widened or compacted)
        parts["forward:fp32 operands"] = copied + 4 * tile * d * widened
        parts["forward:logits"] = 12 * valid * tile
        if backward:
            fixed["backward:fp32 operands"] = copied + 4 * tile * d * widened
            fixed["backward:dE accumulator"] = 4 * valid * d * need_de
            fixed["backward:tiles"] = 16 * valid * tile
            per_column["backward:panel"] = 4 * valid
            per_column["backward:fp32 contraction"] = 4 * d * widened
    parts |= {key: size for key, size in fixed.items() if size}

    panel_rate = max(sum(per_column.values()), 1)
    held = parts["both:row state"] + sum(fixed.values())
    narrowest = min(PANEL_STEP, 64 * math.ceil(v / 64))
    minimum = max(held + narrowest * panel_rate * backward, sum(parts.values()) - sum(fixed.values()))
    if workspace is None:
        workspace = max(DEFAULT_WORKSPACE, itemsize * (n + v) * d, minimum)
    elif workspace < minimum:
        raise ValueError(
            f"workspace: got {workspace} bytes, these sizes (N = {n}, V = {v}, D = {d}, {name}) need at least {minimum}"
        )
    if not backward:
        return Plan("recompute", 0, 0, MappingProxyType(parts), 2 * n * v * d)
    widest = max(narrowest, (workspace - held) // panel_rate // PANEL_STEP * PANEL_STEP)
    panels = math.ceil(v / min(widest, v))
    step = PANEL_STEP if panels > 1 else 64
    width = step * math.ceil(math.ceil(v / panels) / step)
    panels = math.ceil(v / width)
    parts |= {key: size * width for key, size in per_column.items() if size}
    gemms = 1 + need_de + need_dc
    return Plan("recompute", width, panels, MappingProxyType(parts), 2 * n * v * d + 2 * valid * v * d * gemms)
