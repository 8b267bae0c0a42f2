"""Time and memory of forward and backward on a CPU, beside materialized logits.

    python -m benchmarks.cpu [--json benchmarks/results/cpu.json] [--repeats 5] [--threads 2]
        [--dtypes float32 bfloat16] [--losses kernel ...] [--tiny]

Steps run in turn, because a CPU is rarely alone: what counts is the ratio within a run. Beside the time on the clock
stands the time of all threads together, which other processes disturb less. Peaks are those of the resident memory
over that before the step, each in a process of its own; the returned gradients are part of them.

In bf16 there are two ways to materialize: the product in bf16, whose logits are then widened (the bar), and the product
of widened inputs. Where the CPU has no bf16 instructions the first takes minutes: it runs once, in its own process.
What is not measured anew keeps its place in the file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when OpenMP starts

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks import kernel, states  # noqa: E402
from benchmarks.shapes import MIB, Shape  # noqa: E402
from benchmarks.timing import training_step  # noqa: E402

SMOLLM2 = Shape(4096, 49152, 576)
DTYPES = ("float32", "bfloat16")
# The kernel over the materialized loss: median time, peak.
TIME_BAR, PEAK_BAR = 1.0, 0.25
ONCE = ("bfloat16", "materialized")


def losses(cce, dtype: str) -> dict:
    """Name -> loss of e, c and targets."""
    found = {
        "kernel": cce.linear_cross_entropy,
        "recompute": lambda *inputs: cce.linear_cross_entropy(*inputs, schedule="recompute"),
        "materialized": lambda e, c, y: F.cross_entropy((e @ c.T).float(), y),
    }
    if dtype != "float32":
        found["materialized, widened"] = lambda e, c, y: F.cross_entropy(e.float() @ c.float().T, y)
    return found


def steps(cce, dtype: str, shape: Shape) -> dict:
    """Name -> forward and backward on the same states, without ignored targets."""
    s = states.make(shape.n, shape.v, shape.d, getattr(torch, dtype), "cpu", ignored=0.0)
    leaves = (s.e.requires_grad_(), s.c.requires_grad_())
    return {
        name: training_step(lambda loss=loss: loss(*leaves, s.targets), leaves)
        for name, loss in losses(cce, dtype).items()
    }


def cpu_name() -> str:
    info = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return info[1] if info else platform.machine()


def timed(step) -> dict:
    clock, threads = time.perf_counter(), time.process_time()
    step()
    return {"seconds": round(time.perf_counter() - clock, 3), "cpu_seconds": round(time.process_time() - threads, 3)}


def forget_peak() -> None:
    """Give freed memory back and let the peak of this process be what is resident now (Linux, glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def alone(dtype: str, name: str, shape: Shape) -> dict:
    """Peak and time of one step (the child process's job)."""
    cce = kernel.load()
    steps(cce, dtype, Shape(16, 512, shape.d))[name]()
    step = steps(cce, dtype, shape)[name]
    forget_peak()
    before = peak_memory()
    found = timed(step)
    return {"peak_bytes": peak_memory() - before} | found


def in_a_process(dtype: str, name: str, args) -> dict:
    command = [sys.executable, "-m", "benchmarks.cpu", "--alone", dtype, name, "--threads", str(args.threads)]
    command += ["--tiny"] * args.tiny
    return json.loads(subprocess.run(command, cwd=kernel.ROOT, check=True, stdout=subprocess.PIPE).stdout)


def measure(cce, dtype: str, shape: Shape, args) -> dict:
    """The plan of the kernel, then samples and peaks of every loss asked for."""
    plan = cce.plan(shape.n, shape.v, shape.d, dtype, device="cpu", scalar=True)
    names = [name for name in losses(cce, dtype) if name in (args.losses or losses(cce, dtype))]
    found = {name: in_a_process(dtype, name, args) for name in names}
    in_turn = {name: step for name, step in steps(cce, dtype, shape).items() if name in names and (dtype, name) != ONCE}
    samples = [{name: timed(step) for name, step in in_turn.items()} for _ in range(args.repeats)]
    for name in names:
        for key in ("seconds", "cpu_seconds"):
            found[name][key] = [sample[name][key] for sample in samples] if name in in_turn else [found[name][key]]
    return {"n": shape.n, "v": shape.v, "d": shape.d, "plan": str(plan).splitlines(), "losses": found}


def judge(rows: dict) -> list[tuple[str, float, float]]:
    """(what, measured, bar) of each dtype."""
    found = []
    for dtype, row in rows.items():
        kernel_row, materialized = row["losses"]["kernel"], row["losses"]["materialized"]
        for what, key, bar in (("time", "seconds", TIME_BAR), ("peak", "peak_bytes", PEAK_BAR)):
            ours, theirs = (x[key] if key == "peak_bytes" else median(x[key]) for x in (kernel_row, materialized))
            found.append((f"{dtype}: {what} over materialized", ours / theirs, bar))
    return found


def show(dtype: str, row: dict) -> None:
    print(f"\n{dtype}, N = {row['n']}, V = {row['v']}, D = {row['d']}; {row['plan'][0]}")
    print(f"{'':<24}{'median s':>10}{'least s':>10}{'CPU s':>10}{'peak MiB':>10}")
    for name, found in row["losses"].items():
        times = f"{median(found['seconds']):10.2f}{min(found['seconds']):10.2f}{median(found['cpu_seconds']):10.2f}"
        print(f"{name:<24}{times}{found['peak_bytes'] / MIB:10.0f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--losses", nargs="+", metavar="NAME", help="some of them (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the harness")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = SMOLLM2.tiny() if args.tiny else SMOLLM2
    if args.alone:
        print(json.dumps(alone(*args.alone, shape)))
        return 0

    cce = kernel.load()
    found = {"rows": {}}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
    found |= {"torch": torch.__version__, "cpu": cpu_name(), "threads": args.threads}
    for dtype in args.dtypes:
        row = measure(cce, dtype, shape, args)
        row["losses"] = found["rows"].get(dtype, row)["losses"] | row["losses"]
        found["rows"][dtype] = row
        show(dtype, row)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.tiny:
        return 0
    verdicts = judge(found["rows"])
    print()
    for what, ratio, bar in verdicts:
        print(f"{'ok  ' if ratio <= bar else 'FAIL'} {what:<36}{ratio:8.3f} <= {bar}")
    return 0 if all(ratio <= bar for _, ratio, bar in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
