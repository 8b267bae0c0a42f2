"""The contract over many drawn calls on a GPU: `python benchmarks/fuzz.py SEED ...` repeats single examples.

Calls come from tests/common/pool.py by their number, the contract from tests/helpers.py. Each process takes whole
variants, so that no kernel is compiled twice, and poisons its memory with NaN before and between.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks import kernel  # noqa: E402

EXAMPLES = 20_000
WORKERS = 16
SECONDS = 240  # no example begins later than this; a process that is still there a minute later is killed
POISON_EVERY = 250
MOST_FAILURES = 20  # of one process, in full


def check(cce, seed: int, device: str, reference: str) -> None:
    """One example: the kernel on `device`, float64 on `reference`."""
    from common import draws, pool
    from helpers import hold, run

    example = pool.draw(seed)
    case = pool.moved(example.case, device)
    if example.narrow:
        case = case.but(workspace=draws.least_workspace(cce, case, example.needs, device))
    got = run(getattr(cce, example.function), case, needs=example.needs)
    if reference != device:
        case, got = pool.moved(case, reference), {name: t.to(reference) for name, t in got.items()}
    hold(cce, case, got, example.function)


def work(args) -> None:
    """The seeds below `examples` whose variant is this process's; the report is kept up to date."""
    from common import pool

    cce = kernel.load()
    first, step = map(int, args.share.split("/"))
    report = {"examples": 0, "failures": [], "launches": 0, "seed": None}
    begun = time.monotonic()
    seeds = [k for k in range(args.examples) if k % len(pool.VARIANTS) % step == first]
    for i, seed in enumerate(seeds):
        if time.monotonic() - begun > SECONDS:
            break
        if i % POISON_EVERY == 0:
            write(args.report, report)
            poison(args.device)
        report["seed"] = seed
        try:
            check(cce, seed, args.device, args.reference)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:600]
            report["failures"].append({"seed": seed, "arguments": pool.draw(seed).about, "error": message})
            write(args.report, report)
            if "CUDA error" in message or len(report["failures"]) >= MOST_FAILURES:
                report["failures"][-1]["stopped"] = True
                break
        report["examples"] += 1
    if args.device == "cuda":
        report["launches"] = kernel.launches(cce).total()
    write(args.report, report)


def poison(device: str) -> None:
    if device == "cuda":
        from gpu.conftest import poison as fill

        fill(1)


def write(path: Path, report: dict) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(report))
    os.replace(fresh, path)


def run(examples: int = EXAMPLES, workers: int = WORKERS, device: str = "cuda", reference: str = "cuda") -> dict:
    """Every process's report, merged: examples that ran, seeds, launches, failures."""
    kernel.local_build()
    env = {**os.environ, "CCE_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}  # examples are drawn on the CPU
    total = {"examples": 0, "seeds": [0, examples], "launches": 0, "failures": [], "reference": reference}
    with tempfile.TemporaryDirectory() as scratch:
        processes, begun = [], time.monotonic()
        for i in range(workers):
            report, log = Path(scratch) / f"{i}.json", Path(scratch) / f"{i}.log"
            command = [sys.executable, __file__, "--share", f"{i}/{workers}", "--report", str(report)]
            command += ["--examples", str(examples), "--device", device, "--reference", reference]
            with log.open("w") as out:
                processes.append((subprocess.Popen(command, env=env, stdout=out, stderr=out), report, log))
        for process, path, log in processes:
            try:
                code = process.wait(timeout=max(1.0, SECONDS + 60 - (time.monotonic() - begun)))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            found = json.loads(path.read_text()) if path.exists() else {"examples": 0, "failures": [], "launches": 0}
            for key in ("examples", "launches", "failures"):
                total[key] += found[key]
            if code:
                ended = {"error": f"exit {code}: {log.read_text()[-1500:]}", "seed": found.get("seed")}
                total["failures"].append(ended)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--reference", default=None, help="where float64 is computed (default: the device)")
    parser.add_argument("--share", help="I/K: one of the processes of a run, which writes --report")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    args = parser.parse_args()
    args.reference = args.reference or args.device
    os.environ["CCE_TEST_DEVICE"] = "cpu"
    if args.share:
        work(args)
        return 0
    from common import pool

    cce, good = kernel.load(), True
    for seed in args.seeds:
        print(seed, pool.draw(seed).about)
        try:
            check(cce, seed, args.device, args.reference)
        except Exception:
            traceback.print_exc()
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
