"""Time, memory and accuracy on one GPU: `python -m benchmarks.bench [GROUP ...] [--json FILE]`.

Groups: each shape beside the bare GEMMs of the same rounds, then ignored, options, host, error and sweep.
`--tiny --device cpu` runs everything at toy sizes, to try the harness itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel, states, truth  # noqa: E402
from benchmarks.bars import FLOOR_8, MIB, floor_rate, judge, workspace_of  # noqa: E402
from benchmarks.memory import release, step_memory  # noqa: E402
from benchmarks.shapes import HELD, HOST, OPTIONS, SHAPES, SWEEP, Shape  # noqa: E402
from benchmarks.timing import (  # noqa: E402
    captured,
    device_operations,
    gemm_floors,
    host_time,
    interleaved,
    materialized,
    training_step,
)

Record = Callable[[str, dict], None]
OUT_OF_MEMORY = "out of memory"


class Bench:
    """Each method measures one group and hands finished rows to `record`, so that a killed run keeps them."""

    def __init__(self, cce, record: Record, *, device: str = "cuda", tiny: bool = False):
        self.cce, self.record, self.device, self.tiny = cce, record, device, tiny
        self.repeats = 2 if tiny else 10

    def sized(self, shape: Shape) -> Shape:
        return shape.tiny() if self.tiny else shape

    def inputs(self, shape: Shape, **options) -> states.States:
        release()
        s = states.make(shape.n, shape.v, shape.d, torch.bfloat16, self.device, **options)
        s.e.requires_grad_(), s.c.requires_grad_()
        return s

    def describe(self, shape: Shape, **budget) -> dict:
        plan = self.cce.plan(shape.n, shape.v, shape.d, torch.bfloat16, device=self.device, **budget)
        sizes = {"n": shape.n, "v": shape.v, "d": shape.d, "v_aligned": shape.v_aligned, "dtype": "bfloat16"}
        return sizes | {"budget": budget.get("workspace"), "plan": str(plan).splitlines()}

    def run(self, group: str) -> None:
        if group in SHAPES:
            self.beside_floors(group)
        else:
            getattr(self, group)()

    def beside_floors(self, name: str) -> None:
        """Forward alone, forward and backward in its budget, and the bare GEMMs, in the same rounds."""
        shape, repeats = self.sized(SHAPES[name]), self.repeats * (4 if name == "small" else 1)
        s = self.inputs(shape)
        leaves, budget = (s.e, s.c), {"workspace": shape.workspace}

        def loss():
            return self.cce.linear_cross_entropy(*leaves, s.targets, schedule="recompute", **budget)

        def forward():
            with torch.no_grad():
                return self.cce.linear_cross_entropy(*leaves, s.targets)

        step = training_step(loss, leaves)
        row = self.describe(shape, **budget)
        row["bytes"] = {"step": asdict(step_memory(loss, leaves)), "forward": asdict(step_memory(forward))}
        floors = gemm_floors(s.e.detach(), s.c.detach())
        # What runs before decides at which clock a kernel begins: the forward and its GEMM each follow another GEMM.
        steps = {"de": floors["de"], "forward": forward, "dc": floors["dc"], "z": floors["z"], "step": step}
        if name == "small":
            for dtype, fp32 in (("bf16", False), ("fp32", True)):
                usual = training_step(lambda fp32=fp32: materialized(*leaves, s.targets, fp32=fp32), leaves)
                steps[f"materialized_{dtype}"] = usual
        row["samples_ms"] = interleaved(steps, repeats=repeats)
        row["floor_tflops"] = {part: round(floor_rate(**{part: 1})(row), 1) for part in FLOOR_8}
        self.record(name, row)

    def ignored(self) -> None:
        """0, 10, 50 and 90 % of the targets ignored, scattered at random."""
        shape = self.sized(SHAPES["llama3-8b"])
        s = self.inputs(shape, ignored=0.0)
        rng = torch.Generator(device=self.device).manual_seed(1)
        steps = {}
        for share in (0, 10, 50, 90):
            ignored = torch.rand(shape.n, generator=rng, device=self.device) < share / 100
            targets = s.targets.masked_fill(ignored, -100)
            steps[f"ignored_{share}"] = training_step(
                lambda targets=targets: self.cce.linear_cross_entropy(s.e, s.c, targets), (s.e, s.c)
            )
        row = self.describe(shape, scalar=True)
        row["samples_ms"] = interleaved(steps, repeats=self.repeats)
        self.record("ignored", row)

    def options(self) -> None:
        """Forward and backward with one option each, and with the entropy, beside the plain call of the same schedule.

        All of them by `recompute`, which serves every option; those that `single_pass` serves by it too.
        """
        shape = self.sized(OPTIONS)
        s, budget = self.inputs(shape), {"workspace": shape.workspace}
        rng = torch.Generator(device=self.device).manual_seed(2)
        weight, token_weight = (torch.rand(k, generator=rng, device=self.device) + 0.5 for k in (shape.v, shape.n))
        calls = {
            "plain": {},
            "softcap": {"softcap": 30.0},
            "bias": {"bias": s.bias.detach().requires_grad_()},
            "label_smoothing": {"label_smoothing": 0.1},
            "z_loss": {"z_loss": 1e-4},
            "weight": {"weight": weight},
            "token_weight": {"token_weight": token_weight},
            "temperature": {"temperature": 0.7},
            "logit_scale": {"logit_scale": 0.5},
            "return_lse": {"return_lse": True},
            "none": {"reduction": "none"},
        }

        def loss(schedule="recompute", **options):
            found = self.cce.linear_cross_entropy(s.e, s.c, s.targets, schedule=schedule, **options, **budget)
            return sum(t.sum() for t in found) if isinstance(found, tuple) else found.sum()

        def entropy():
            stats = self.cce.linear_token_stats(s.e, s.c, s.targets, **budget)
            return (stats.entropy - stats.logprob).sum()

        losses = {name: partial(loss, **options) for name, options in calls.items()} | {"entropy": entropy}
        served = [name for name in calls if name not in ("return_lse", "none")]
        losses |= {f"single_pass/{name}": partial(loss, "single_pass", **calls[name]) for name in served}
        leaves = (s.e, s.c, calls["bias"]["bias"])
        steps = {name: training_step(call, leaves) for name, call in losses.items()}
        row = self.describe(shape, **budget)
        row["samples_ms"] = interleaved(steps, repeats=2 * self.repeats)
        self.record("options", row)

    def host(self) -> None:
        """Host time where the device has little to do, with as few panels as the default takes and with many.

        Beside the first, the materialized loss on 16-bit logits, and the same step replayed from a CUDA graph.
        """
        large = SHAPES["llama3-8b"]
        panels = self.cce.plan(large.n, large.v, large.d, torch.bfloat16, workspace=large.workspace, kept=0).panels
        many = Shape(HOST.n, large.v, 64)
        budgets = {"host": (HOST, None), "host/panels": (many, self.budget_for_panels(many, panels))}
        for name, (shape, workspace) in budgets.items():
            s = self.inputs(shape)

            def loss(s=s, workspace=workspace):
                return self.cce.linear_cross_entropy(s.e, s.c, s.targets, workspace=workspace)

            step = training_step(loss, (s.e, s.c))
            row = self.describe(shape, workspace=workspace, scalar=True)
            steps = {"step": step}
            if name == "host":
                usual = partial(materialized, s.e, s.c, s.targets, fp32=False)
                steps["materialized_bf16"] = training_step(usual, (s.e, s.c))
                if self.device == "cuda":
                    steps["captured"], _ = captured(lambda s=s, loss=loss: torch.autograd.grad(loss(), (s.e, s.c)))
            row["samples_us"] = {key: host_time(call, repeats=5 * self.repeats) for key, call in steps.items()}
            row["device_operations"] = device_operations(step)
            if self.device == "cuda":
                counter = kernel.launches(self.cce)
                before = counter.copy()
                step()
                row["triton_launches"] = dict(counter - before)
            self.record(name, row)

    def budget_for_panels(self, shape: Shape, panels: int) -> int | None:
        """The least budget whose plan has no more than this many panels."""
        for workspace in range(1 << 16, 1 << 28, 1 << 16):
            sizes = (shape.n, shape.v, shape.d, torch.bfloat16)
            try:
                plan = self.cce.plan(*sizes, device=self.device, workspace=workspace, kept=0)
            except ValueError:
                continue
            if plan.panels <= panels:
                return workspace
        return None

    def budget_of(self, shape: Shape, schedule: str) -> int | None:
        """The shape's budget; None, for the schedule's own, where it needs more."""
        try:
            self.describe(shape, workspace=shape.workspace, schedule=schedule, scalar=True)
        except ValueError:
            return None
        return shape.workspace

    def error(self) -> None:
        """Both schedules, where it is enough in the shape's budget, and materialized bf16 against float64."""
        for name, (shape, options) in HELD.items():
            shape = self.sized(shape)
            s = self.inputs(shape)
            inputs = (s.e, s.c, s.targets)
            exact = truth.truth(s.e.detach(), s.c.detach(), s.targets, **options)
            row = self.describe(shape, workspace=shape.workspace)
            row["mean_loss"] = exact.reduced.item()
            losses = {}
            for schedule in ("recompute", "single_pass"):
                call = partial(self.cce.linear_cross_entropy, *inputs, schedule=schedule, **options)
                losses[schedule] = partial(call, workspace=self.budget_of(shape, schedule))
            losses["materialized_bf16"] = partial(materialized, *inputs, fp32=False, **options)
            for key, function in losses.items():
                loss = function()
                de, dc = torch.autograd.grad(loss, (s.e, s.c))
                row[key] = truth.errors(loss, de, dc, exact)
            del exact, de, dc
            self.record(f"error/{name}", row)

    def sweep(self) -> None:
        """Peak memory and time against tokens, beside materialized logits with an fp32 softmax."""
        shapes = [Shape(64 << k, 512, 64) for k in range(3)] if self.tiny else SWEEP
        for shape in shapes:
            s = self.inputs(shape)
            row = self.describe(shape, scalar=True)
            losses = {
                "kernel": lambda: self.cce.linear_cross_entropy(s.e, s.c, s.targets),  # noqa: B023
                "materialized": lambda: materialized(s.e, s.c, s.targets),  # noqa: B023
            }
            row["bytes"], row["samples_ms"], row["failed"] = {}, {}, {}
            for name, loss in losses.items():
                try:
                    row["bytes"][name] = asdict(step_memory(loss, (s.e, s.c), arena=0))
                    step = training_step(loss, (s.e, s.c))
                    row["samples_ms"] |= interleaved({name: step}, repeats=self.repeats // 2, warmup=1)
                except torch.OutOfMemoryError:
                    row["failed"][name] = OUT_OF_MEMORY
                s.e.grad = s.c.grad = None
                release()
            self.record(f"sweep/{shape.n}", row)


GROUPS = (*SHAPES, "ignored", "options", "host", "error", "sweep")


def summary(name: str, row: dict) -> str:
    times = {k: f"{median(x):.4g}" for k, x in (row.get("samples_ms") or row.get("samples_us") or {}).items()}
    memory = {k: f"{workspace_of(row, k) / MIB:.1f}" for k in row.get("bytes", {})}
    rest = [row[key] for key in ("recompute", "single_pass", "floor_tflops", "failed") if row.get(key)]
    return " ".join(map(str, [f"{name}: {times} MiB {memory}", *rest]))


def run(cce, groups, record: Record, **options) -> dict[str, str]:
    """Measure group after group. One that raises is shown and returned with its message; the others still run."""

    def shown(name: str, row: dict) -> None:
        print(summary(name, row), flush=True)
        record(name, row)

    bench, failed = Bench(cce, shown, **options), {}
    for group in groups:
        try:
            bench.run(group)
        except Exception as error:
            traceback.print_exc()
            failed[group] = f"{type(error).__name__}: {error}"[:500]
        release()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--json", type=Path, help="file to write the rows to, after each one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the harness")
    args = parser.parse_args()
    unknown = set(args.groups) - set(GROUPS)
    if unknown:
        parser.error(f"unknown group {', '.join(sorted(unknown))}; accepted: {', '.join(GROUPS)}")
    rows: dict[str, dict] = {}

    def record(name: str, row: dict) -> None:
        rows[name] = row
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))

    failed = run(kernel.load(), args.groups or GROUPS, record, device=args.device, tiny=args.tiny)
    if not args.tiny:
        print(*judge(rows), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
