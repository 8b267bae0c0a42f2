"""The shapes that are measured, and the byte budgets that go with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    n: int  # tokens
    v: int  # vocabulary
    d: int  # hidden size
    workspace: int | None = None  # bytes over inputs and gradients for `recompute`; None: the default

    @property
    def v_aligned(self) -> int:
        """The vocabulary at which the bare GEMMs run: cuBLAS is 5 to 7 times slower on an odd one."""
        return -(-self.v // 64) * 64

    def tiny(self) -> Shape:
        """For dry runs on a CPU: odd sizes stay odd."""
        return replace(self, n=min(self.n, 64 + self.n % 2), v=512 + self.v % 512, d=64, workspace=None)


SHAPES = {
    "llama3-8b": Shape(8192, 128256, 4096, 400 * MIB),
    "gemma2-2b": Shape(8192, 256000, 2304, 320 * MIB),
    "wide": Shape(65536, 128256, 2048, 1536 * MIB),
    "odd": Shape(65535, 176245, 1024, 1280 * MIB),
    "small": Shape(2048, 32000, 1024),
}
# Every option beside the plain call, both in this budget.
OPTIONS = replace(SHAPES["llama3-8b"], workspace=GIB)
# Where gradients are held against float64, with the options of the call. Smoothing has room for kept exponentials and
# for one block: its term is then added to the product that becomes dC.
HELD = {name: (SHAPES[name], {}) for name in ("llama3-8b", "gemma2-2b")}
HELD["llama3-8b, label smoothing"] = replace(SHAPES["llama3-8b"], workspace=3 * GIB), {"label_smoothing": 0.1}
# Host time is measured where the GPU is done before the host has finished calling.
HOST = Shape(64, 32000, 256)
# Peak memory and time against tokens: V and D of a 1B-parameter model with the Llama 3 vocabulary.
SWEEP = [Shape(1024 << k, 128256, 2048) for k in range(8)]
