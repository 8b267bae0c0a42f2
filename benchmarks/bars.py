"""What a run on an H200 has to reach: one table, read by the benchmark, the checker and the README.

A measurement is a row of `bench`: its sizes, `samples_ms` by step, `bytes` and `values`. Ratios are between medians
of samples taken in the same rounds, so that they depend on the code and not on the day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmarks.shapes import HELD, MIB


@dataclass(frozen=True, slots=True)
class Bar:
    row: str
    what: str
    measure: Callable[[dict], float]
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        """NaN meets nothing."""
        return value <= self.at_most if self.at_least is None else value >= self.at_least

    def __str__(self) -> str:
        side = f"at most {self.at_most:.6g}" if self.at_least is None else f"at least {self.at_least:.6g}"
        return f"{self.row}: {self.what}, {side}"


def ratio(step: str, **floor: int) -> Callable[[dict], float]:
    """Time of `step` over a sum of other steps, each taken so many times."""
    return lambda row: milliseconds(row, step) / sum(k * milliseconds(row, name) for name, k in floor.items())


def milliseconds(row: dict, step: str) -> float:
    return median(row["samples_ms"][step])


def floor_rate(**floor: int) -> Callable[[dict], float]:
    """TF/s of bare GEMMs, 2 N V D operations each, at the aligned V."""

    def rate(row: dict) -> float:
        operations = 2 * row["n"] * row["v_aligned"] * row["d"] * sum(floor.values())
        return operations / sum(k * milliseconds(row, name) for name, k in floor.items()) / 1e9

    return rate


def workspace_of(row: dict, step: str) -> int:
    """Peak bytes over what was alive before and the gradients."""
    used = row["bytes"][step]
    return used["peak"] - used["before"] - used["gradients"]


def step_mib(row: dict) -> float:
    return workspace_of(row, "step") / MIB


def forward_share(row: dict) -> float:
    """Bytes of the forward alone over 2 N V."""
    return workspace_of(row, "forward") / (2 * row["n"] * row["v"])


def error(schedule: str, name: str) -> Callable[[dict], float]:
    return lambda row: row[schedule][name]


def host_median(row: dict) -> float:
    return median(row["samples_us"]["step"])


FLOOR_8 = {"z": 2, "de": 1, "dc": 1}  # 8 N V D: the logits twice
RATE = 650.0  # TF/s below which the card was not at speed and the run does not count

OPTION_COSTS = dict.fromkeys(
    ("softcap", "bias", "label_smoothing", "z_loss", "weight", "token_weight", "temperature", "logit_scale")
    + ("return_lse", "none"),
    1.03,
) | {"entropy": 1.06}

LARGE = {  # shape: (MiB over inputs and gradients, forward and backward over the 8 N V D floor)
    "llama3-8b": (400, 1.08),
    "gemma2-2b": (320, 1.10),
    "wide": (1536, 1.10),
    "odd": (1280, 1.12),
}
BARS = [
    bar
    for shape, (budget, at_most) in LARGE.items()
    for bar in (
        Bar(shape, "forward over its GEMM", ratio("forward", z=1), 1.08),
        Bar(shape, "forward's bytes over 2 N V", forward_share, 0.01),
        Bar(shape, "forward and backward over the 8 N V D floor", ratio("step", **FLOOR_8), at_most),
        Bar(shape, "MiB over inputs and gradients", step_mib, budget),
    )
]
BARS += [
    Bar(shape, "TF/s of the floor", floor_rate(**FLOOR_8), at_least=RATE)
    for shape in ("llama3-8b", "gemma2-2b", "wide")
]
BARS += [
    Bar("small", "forward and backward over materialized bf16", ratio("step", materialized_bf16=1), 1.4),
    Bar("ignored", "90 % ignored over none ignored", ratio("ignored_90", ignored_0=1), 0.15),
    Bar("host", "microseconds on the host per step", host_median, 300),
]
BARS += [
    Bar("options", f"{name} over the plain call", ratio(name, plain=1), cost) for name, cost in OPTION_COSTS.items()
]
BARS += [
    Bar("options", f"{name} by single_pass", ratio(f"single_pass/{name}", **{"single_pass/plain": 1}), 1.03)
    for name in OPTION_COSTS
    if name not in ("return_lse", "none", "entropy")
]
BARS += [
    Bar(f"error/{held}", f"relative error of {name} by {schedule}", error(schedule, name), at_most)
    for held in HELD
    for schedule in ("recompute", "single_pass")
    for name, at_most in (("loss", 1e-5), ("de", 2.9e-3), ("dc", 2.9e-3))
]


@dataclass(frozen=True, slots=True)
class Finding:
    bar: Bar
    value: float | None  # None: not measured
    ok: bool

    def __str__(self) -> str:
        found = "not measured" if self.value is None else f"{self.value:.6g}"
        return f"{'ok    ' if self.ok else 'MISSED'} {self.bar}: {found}"


def judge(rows: dict[str, dict]) -> list[Finding]:
    """Every bar against the recorded rows; a row or sample that is absent is a miss."""
    findings = []
    for bar in BARS:
        try:
            found = float(bar.measure(rows[bar.row]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            findings.append(Finding(bar, None, False))
        else:
            findings.append(Finding(bar, found, bar.met(found)))
    return findings
