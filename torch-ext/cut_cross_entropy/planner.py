"""From sizes and a byte budget to a plan: panel width, scratch bytes by name, floating-point operations.

Pure Python on integers. A plan depends on the sizes, the dtype, the class of device and the budget, never on what is
free on the card at the moment, so that the same call always runs the same reductions in the same order.

Two kinds of device differ in what they keep in memory:

* ``cuda`` (Triton kernels): a panel of dlogits in the dtype of the inputs, contracted by GEMMs that read 16 bits and
  accumulate in fp32. Compacted hidden states lie in the storage of dE until its rows are written at the end.
* anything else (plain torch operations): fp32 panels, fp32 copies of the 16-bit operands, one panel at a time.

Times are of one H200 (fitted to benchmarks/results); what is chosen by them is their order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .splits import forward_splits

MIB = 1 << 20
SCHEDULES = ("auto", "recompute", "single_pass")

# Panel widths are multiples of this: the widest vocabulary tile of the kernels, and a multiple of the 64 columns that
# every GEMM extent and row stride should be divisible by.
PANEL_STEP = 256
# Per token: the fp32 vectors nll, lse, m, s and the int32 row index.
STATE_BYTES = 20
# What the default budget is at least.
DEFAULT_WORKSPACE = 64 * MIB
# Columns of a panel that the default budget has room for: narrower ones spend their time on the accumulator of dE.
DEFAULT_PANEL = 4096
# Of the torch backend, a tile of logits: 2 MiB in fp32, for the cache of a CPU. Blocks of more tokens than CPU_BLOCK
# gain nothing there.
TILE_ROWS, TILE_COLUMNS, CPU_BLOCK = 512, 1024, 512
# Rows of the tile of the fold that writes a panel; the least tokens of a block.
FOLD_ROWS, LEAST_BLOCK = 128, 64
# Of an H200: dense 16-bit and IEEE fp32 products, operations a second; sums that products add to, bytes a second (part
# of that traffic lies under the products); multiprocessors. Then seconds: a call, a panel, a block of tokens, keeping
# exponentials for the backward.
TENSOR_RATE, FP32_RATE, SUM_RATE, PROCESSORS = 700e12, 40e12, 6e12, 132
CALL, PANEL, BLOCK, KEEPING = 1e-4, 7e-5, 1e-4, 4e-4
# dC summed over blocks of tokens is rounded to 16 bits after each, save the rows of the ids with most targets: FREQUENT
# of them, and beyond FOR_BLOCKS blocks more in proportion, since the more often a row is rounded, the fewer may be
# (docs/numerics.md). Of more than MANY_BLOCKS all of it is kept in fp32.
FREQUENT, FOR_BLOCKS, MANY_BLOCKS = 256, 32, 160
# Tokens of a panel of all classes beyond which its products get slower, and how much.
LARGE_PANEL, SLOWER = 16384, 1.05
# Tiles of cuBLAS's products: their sides, how much longer a product of them alone takes, and the most parts that its
# inner dimension is divided into, which takes longer too.
GEMM_TILES = ((128, 256, 1.0, 8), (128, 320, 1.0, 8), (128, 192, 1.04, 8), (192, 192, 1.0, 1))
DIVIDED = 1.02
# Numbers of kept columns that are weighed, as shares of the vocabulary; bytes a second of a pass over memory.
KEPT_SHARES, PASS_RATE = 16, 4e12


def _up(size, step):
    """The least multiple of `step` that is no less."""
    return step * math.ceil(size / step)


def _bytes(parts, stage):
    return sum(size for name, size in parts.items() if name.partition(":")[0] in ("both", stage))


def _peak(parts):
    return max(_bytes(parts, "forward"), _bytes(parts, "backward"))


@dataclass(frozen=True, slots=True)
class Plan:
    """What one forward and backward pass will use.

    Attributes:
        schedule: name of the order of loops.
        panel: vocabulary columns per panel (its row stride as well).
        panels: how many panels cover the vocabulary.
        block: tokens per panel.
        blocks: how many blocks of tokens there are.
        kept: classes whose exponentials the forward of `recompute` leaves for the backward.
        chunk: columns of the dE of a block that are contracted at a time.
        fp32_rows: rows of dC that `single_pass` sums over blocks in fp32: all, or those of the ids with most targets,
            or 0 where dC itself holds the sum.
        parts: scratch bytes by name; ``forward:`` parts and ``backward:`` parts are not alive together.
        flops: floating-point operations of all GEMMs.
        milliseconds: predicted time on an H200; None for plain torch operations.
    """

    schedule: str
    panel: int
    panels: int
    block: int
    blocks: int
    chunk: int
    fp32_rows: int
    kept: int
    parts: Mapping[str, int]
    flops: int
    milliseconds: float | None

    @property
    def workspace(self) -> int:
        """Peak bytes over the inputs and the returned gradients."""
        return _peak(self.parts)

    def __str__(self) -> str:
        time = "" if self.milliseconds is None else f", {self.milliseconds:.3g} ms on an H200"
        shape = f"{self.panels} x {self.blocks} panels of {self.panel} columns by {self.block} tokens"
        shape += f", {self.kept} columns kept" * (self.kept > 0)
        lines = [f"{self.schedule}: {shape}, {self.flops / 1e12:.2f} TFLOP{time}"]
        sizes = {**self.parts, "peak": self.workspace}
        width = max(map(len, sizes))
        return "\n".join([*lines, *(f"  {name:<{width}} {size / MIB:12.2f} MiB" for name, size in sizes.items())])


@dataclass(frozen=True, slots=True)
class _Sizes:
    """One call as the schedules' byte counts see it."""

    n: int
    v: int
    d: int
    valid: int
    itemsize: int
    compacted: bool
    need_de: bool
    need_dc: bool
    need_dbias: bool
    half: bool  # fp16, whose panel is scaled
    gpu: bool

    @property
    def backward(self):
        return self.need_de or self.need_dc or self.need_dbias

    def tile(self, rows):
        """Bytes of a tile of logits of the torch backend and of the rows of c widened for it."""
        columns = min(self.v, TILE_COLUMNS)
        return 4 * min(rows, TILE_ROWS) * columns, 4 * columns * self.d * (self.itemsize < 4)

    def fp32_row_choices(self, blocks):
        """How many rows of dC may be summed in fp32 over so many blocks."""
        if not self.need_dc or self.itemsize == 4 or blocks == 1:
            return [0]
        frequent = FREQUENT * max(blocks, FOR_BLOCKS) // FOR_BLOCKS
        return [frequent, self.v] if self.gpu and blocks <= MANY_BLOCKS and frequent < self.v else [self.v]

    def splits(self, n):
        # Of a device of 132 multiprocessors and the taller or lower tiles, a twentieth of a percent of the logits.
        found = [forward_splits(n, self.v, self.d, block_m=m, block_n=256, processors=PROCESSORS) for m in (128, 192)]
        return 8 * n * max(splits.listed for splits in found)


def _panel_columns(v, widest):
    panels = math.ceil(v / min(widest, v))
    step = PANEL_STEP if panels > 1 else 64
    width = _up(math.ceil(v / panels), step)
    return width, math.ceil(v / width)


def _default_budget(s: _Sizes, schedule):
    """Bytes that a schedule may take where the call does not say: on a GPU the same for both."""
    panels = _panel_parts(s, min(DEFAULT_PANEL, _up(s.v, 64)))
    budget = max(DEFAULT_WORKSPACE, s.itemsize * (s.n + s.v) * s.d, _peak(panels))
    if schedule == "single_pass" and not s.gpu:
        # A sixth of what materializing takes is not worth slower, shorter blocks.
        block = min(s.n, CPU_BLOCK)
        (fp32_rows,) = s.fp32_row_choices(math.ceil(s.n / block))
        budget = max(budget, min(_peak(_block_parts(s, block, s.d, fp32_rows)), 2 * s.n * s.v))
    return budget


def _panel_parts(s: _Sizes, width, kept=0):
    """Scratch of `recompute` with panels of so many columns, and so many kept since the forward, of every token."""
    both, forward, backward = {"row state": STATE_BYTES * s.n}, {}, {}
    if s.gpu:
        rows = s.n if kept else s.valid
        forward["split partials"] = s.splits(s.n)
        in_place = s.itemsize == 4 and not s.compacted
        both["kept panel"] = s.itemsize * rows * _up(kept, 64)
        backward["dE accumulator"] = 4 * rows * s.d * (s.need_de and not in_place)
        backward["compacted e"] = s.itemsize * rows * s.d * (s.compacted and not s.need_de)
        backward["scaled rows of e"] = s.itemsize * rows * s.d * (kept > 0 and s.need_dc)
        backward["panel"] = s.itemsize * rows * width
        backward["fp32 dC panel"] = 4 * s.d * width * (s.half and s.need_dc)
        # What the programs of `column_sum` have summed, 128 columns each, and their total.
        backward["dbias panel"] = (4 * 128 * 4 * PROCESSORS + 8 * max(width, kept)) * s.need_dbias
    else:
        forward["tile"], widened = s.tile(s.valid)
        forward["fp32 operands"] = (4 + s.itemsize) * min(s.valid, TILE_ROWS) * s.d + widened
        copied = 4 * s.valid * s.d * (s.itemsize < 4 or s.compacted)
        backward["row state"] = 44 * s.valid
        backward["slice"] = forward["tile"] // 8
        backward["fp32 operands"] = copied + widened
        backward["dE accumulator"] = copied * s.need_de
        backward["panel"] = 4 * s.valid * width
    parts = {f"both:{name}": size for name, size in both.items() if size}
    parts |= {f"forward:{name}": size for name, size in forward.items()}
    return parts | {f"backward:{name}": size for name, size in backward.items() if size and s.backward}


def _recompute(s: _Sizes, budget, kept):
    """The plan of the widest panels within the budget, or of the narrowest. Where `kept` is None, as many as pay."""
    if kept is None:
        shares = KEPT_SHARES if s.gpu and s.backward and not s.half else 0
        choices = [min(s.v, _up(s.v * i / KEPT_SHARES, PANEL_STEP)) for i in range(shares + 1)]
        lean, *others = [_recompute(s, budget, kept) for kept in choices]
        # Whether there is room at all is a question of the leanest.
        fitting = [p for p in others if p.workspace <= budget and lean.workspace <= budget]
        return min([lean, *fitting], key=lambda p: p.milliseconds)
    width = panels = 0
    product = functools.partial(_product, s, panel=s.n if kept else 0)
    time = product(s.n, epilogue=85 if kept else 45)
    if s.backward:
        rows, rest = s.n if kept else s.valid, s.v - kept
        if rest:
            held = _bytes(_panel_parts(s, 0, kept), "backward")
            per_column = max(_bytes(_panel_parts(s, 1, kept), "backward") - held, 1)
            widest = (budget - held) // per_column // PANEL_STEP * PANEL_STEP
            width, panels = _panel_columns(rest, max(widest, PANEL_STEP if s.gpu else TILE_COLUMNS))
        waves = _waves(rows, s.d) if kept else 1
        time += product(rows, epilogue=110) * rest / s.v + product(rows) * (s.need_de * waves + s.need_dc)
        time += panels * (PANEL + 8 * rows * s.d * s.need_de / SUM_RATE)
        # What is kept is a block of all tokens; rows of e and of dE are scaled besides.
        time += (kept > 0) * (KEEPING + 14 * rows * s.d / PASS_RATE)
    flops = 2 * s.n * s.v * s.d + 2 * s.valid * s.d * (s.v * (s.need_de + s.need_dc) + (s.v - kept) * s.backward)
    parts = MappingProxyType(_panel_parts(s, width, kept))
    return Plan("recompute", width, panels, s.valid, 1, s.d, 0, kept, parts, flops, _milliseconds(s, time))


def _block_sizes(n):
    """Tokens of a block that are weighed: four to an octave."""
    octaves = [LEAST_BLOCK << k for k in range(n.bit_length())]
    return sorted({min(n, octave * step // 4) for octave in octaves for step in (4, 5, 6, 7)})


def _block_parts(s: _Sizes, block, chunk, fp32_rows):
    """Scratch of `single_pass` with blocks of so many tokens, whose dE is contracted so many columns at a time."""
    parts = {"both:row state": 12 * s.n, "forward:row state": (32 if s.gpu else 64) * block}
    parts["forward:panel"] = (s.itemsize if s.gpu else 4) * block * _up(s.v, 64)
    # The scaled rows of e, and where dC is done with them, rows of dE before they are rounded.
    parts["forward:rows of e, then of dE"] = 4 * block * chunk
    if s.gpu:
        parts["forward:split partials"] = 8 * block * max(s.v // 1024, math.ceil(4 * PROCESSORS / block * 128))
    else:
        tile, parts["forward:fp32 operands"] = s.tile(block)
        parts["forward:slice"] = tile // 8
        parts["forward:rows in their own dtype"] = s.itemsize * block * s.d
    sums = 4 * fp32_rows * s.d
    if 0 < fp32_rows < s.v:
        # Sorting targets comes after the last columns are gathered; then a flag a class and a share a token. Counts are
        # sorted before there is a panel, in fewer bytes than that.
        sums += max(s.itemsize * fp32_rows * block, 48 * s.n) + s.v + 4 * s.n
    parts["forward:fp32 rows of dC"] = sums
    if s.need_dbias:
        partial = min(math.ceil(4 * PROCESSORS / max(math.ceil(s.v / 128), 1)), math.ceil(block / 32)) if s.gpu else 1
        parts["forward:fp32 dbias"] = 4 * s.v * (partial + (partial > 1) + (s.n > block))
    return {name: size for name, size in parts.items() if size}


def _single_pass(s: _Sizes, budget):
    """The plan of the least predicted time within the budget, or of the fewest bytes."""

    def seconds(block, chunk, fp32_rows):
        if not s.gpu:
            return abs(block - CPU_BLOCK)
        blocks, ids = math.ceil(s.n / block), fp32_rows if fp32_rows < s.v else 0
        # Columns of frequent ids are gathered, then contracted: twice the time of their product.
        product = functools.partial(_product, s, panel=block)
        rest = s.n % block
        folded = s.n // block * _up(block, FOLD_ROWS) + _up(rest, FOLD_ROWS)
        # The classifier is read for each block, which of few tokens takes longer than to multiply by it.
        reading = blocks * s.itemsize * s.v * s.d / PASS_RATE
        time = max(product(folded, epilogue=85), reading)
        time += s.need_de * max(product(s.n) * _waves(block, chunk), reading)
        time += s.need_dc * product(s.n) * (1 + 2 * ids / s.v)
        return time + blocks * BLOCK + (blocks - 1) * s.v * s.d * s.need_dc * (4 if ids else 8) / SUM_RATE

    # The same candidates for every budget, so that a larger one is never slower.
    used, half = {}, min(s.d, _up(math.ceil(s.d / 2), 64))
    chunks = (s.d, half) if s.gpu and s.itemsize < 4 else (s.d,)
    for block in _block_sizes(s.n):
        for chunk in chunks:
            for fp32_rows in s.fp32_row_choices(math.ceil(s.n / block)):
                used[block, chunk, fp32_rows] = _peak(_block_parts(s, block, chunk, fp32_rows))
    fitting = [sizes for sizes in used if used[sizes] <= budget] or [min(used, key=used.get)]
    block, chunk, fp32_rows = min(fitting, key=lambda sizes: seconds(*sizes))
    flops = 2 * s.n * s.v * s.d * (1 + s.need_de + s.need_dc)
    parts, width = MappingProxyType(_block_parts(s, block, chunk, fp32_rows)), _up(s.v, 64)
    time = _milliseconds(s, seconds(block, chunk, fp32_rows))
    return Plan("single_pass", width, 1, block, math.ceil(s.n / block), chunk, fp32_rows, 0, parts, flops, time)


def _product(s: _Sizes, rows, *, epilogue=0, panel=0):
    """Seconds of products of rows x V x D, by panels of so many tokens.

    What is done to each of their results takes the time of `epilogue` more of D.
    """
    rate = (TENSOR_RATE if s.itemsize < 4 else FP32_RATE) / (SLOWER if panel > LARGE_PANEL else 1.0)
    return 2 * rows * s.v * (1.01 * s.d + epilogue) / rate


@functools.lru_cache(1024)
def _waves(rows, d):
    """How much longer a product of few rows takes because its tiles do not fill the last wave, nor its rows the tiles.

    cuBLAS chooses among tile shapes, and divides the inner dimension (here the vocabulary) where tiles are few.
    """
    rows, d, found = max(rows, 1), max(d, 1), []
    for *sides, longer, most in GEMM_TILES:
        for bm, bn in (sides, sides[::-1]):
            tiles = math.ceil(rows / bm) * math.ceil(d / bn)
            for k in (1, 2, 3, 4, 6, 8):
                if k == 1 or (k <= most and k * tiles <= 3 * PROCESSORS):
                    area = _up(k * tiles, PROCESSORS) * bm * bn
                    found.append(area / (k * rows * d) * longer * (DIVIDED if k > 1 else 1.0))
    return min(found)


def _milliseconds(s: _Sizes, seconds):
    return 1e3 * (seconds + CALL) if s.gpu else None


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
    kept: int | None = None,
    schedule: str = "auto",
    scalar: bool = False,
) -> Plan:
    """The plan that ``linear_cross_entropy`` follows for these sizes.

    Args:
        n, v, d: tokens, vocabulary, hidden size.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32`` (or its name).
        device: ``"cuda"`` for the Triton kernels, any other name for the plain torch backend.
        valid: tokens whose target is not ignored, where known; otherwise room is kept for any number of them.
        compacted: whether the valid rows of e are copied together; by default unless `valid` says that all are.
        need_de, need_dc, need_dbias: which gradients are wanted.
        workspace: byte budget over inputs and gradients. The default is the same for both schedules: max(64 MiB, bytes
            of e and c, what `recompute` needs for panels of 4096 columns). With plain torch operations `single_pass`
            may also take what it needs for blocks of 512 tokens, up to a sixth of what materialized fp32 logits take;
            asked for by name, it may on any device take what it needs at least.
        kept: classes whose exponentials the forward of `recompute` leaves for the backward, which then need not rebuild
            their logits. By default as many as pay within a `workspace` that the call names, and none without one, with
            float16 or plain torch operations. Give 0 for calls that cannot keep any: compiled ones, those with entropy
            or prediction, and those with the label smoothing that ``single_pass`` does not serve.
        schedule: ``"auto"`` (the one of least predicted time within the budget; with plain torch operations
            `single_pass` where it fits), ``"recompute"`` or ``"single_pass"``.
        scalar: whether the call is one that ``single_pass`` can serve: a mean or sum of bfloat16 or float32
            with a gradient of e or c, without return_lse and without label_smoothing above 0.5 or under a softcap.

    Raises:
        ValueError: the budget is below what the sizes need, or the schedule is unknown or cannot serve the call.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, accepted are {', '.join(map(repr, SCHEDULES))}")
    name = str(dtype).removeprefix("torch.")
    itemsize = {"bfloat16": 2, "float16": 2, "float32": 4}.get(name)
    if itemsize is None:
        raise TypeError(f"dtype: got {dtype}, accepted are bfloat16, float16 and float32")
    if compacted is None:
        compacted = valid is None or valid < n
    s = _Sizes(
        n, v, d, n if valid is None else valid, itemsize, compacted, need_de, need_dc, need_dbias,
        name == "float16", device == "cuda",
    )  # fmt: skip
    scalar = scalar and s.valid > 0 and d > 0 and (need_de or need_dc) and not s.half
    if schedule == "single_pass" and not scalar:
        raise ValueError("schedule: 'single_pass' needs a scalar loss with gradients; see plan(scalar=...)")
    plans, fitting = [], []
    if workspace is None:
        kept = 0
    for name_of, plan_of in (("single_pass", _single_pass), ("recompute", functools.partial(_recompute, kept=kept))):
        if schedule in ("auto", name_of) and (scalar or name_of == "recompute"):
            budget = _default_budget(s, name_of) if workspace is None else workspace
            found = plan_of(s, budget)
            plans.append(found)
            # Asked for by name and without a budget, a schedule gets what it needs.
            if found.workspace <= budget or (workspace is None and schedule == name_of):
                fitting.append(found)
    if not fitting:
        raise ValueError(
            f"workspace: got {workspace} bytes, these sizes (N = {n}, V = {v}, D = {d}, {name}) need at least "
            f"{min(found.workspace for found in plans)}"
        )
    return min(fitting, key=lambda chosen: chosen.milliseconds or 0.0)
