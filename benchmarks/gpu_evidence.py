"""Run the GPU parts and record them: `python benchmarks/gpu_evidence.py PART ... [--results FILE]`.

correctness   every test in tests/gpu: small ones side by side while they compile, then the large ones alone
sanitize      compute-sanitizer memcheck, racecheck and initcheck, and a planted write that must be found
fuzz          20,000 drawn calls against float64
bench         times beside the bare GEMMs, memory, gradient errors, the sweep over tokens

Each part stays under ten minutes, and writes after every test and measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import bars, fuzz, kernel, recorder, sanitize  # noqa: E402
from benchmarks.evidence import RESULTS, Evidence, environment  # noqa: E402
from tools.source_hash import torch_ext_sha256  # noqa: E402

WORKERS = 8
NO_TESTS = 5  # pytest's exit status where -k leaves none


def correctness(evidence: Evidence, args) -> bool:
    """pytest over tests/gpu, in its own processes; the recorder plugin writes into the same file."""
    env = {**os.environ, recorder.PATH: str(evidence.path.resolve()), "CCE_BUILT": str(ROOT)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--tb=short"]
    command += ["-p", "benchmarks.recorder", "-p", "no:cacheprovider"]
    command += ["-k", args.only] if args.only else []
    side_by_side = ["-n", str(args.workers), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    codes = [
        subprocess.run([*command, "-m", mark, *options], cwd=ROOT, env=env).returncode
        for mark, options in (("not large", side_by_side), ("large", []))
    ]
    evidence.data = Evidence(evidence.path, evidence.data["torch_ext_sha256"]).data
    outcomes = [test["outcome"] for test in evidence.data["parts"]["correctness"].get("tests", {}).values()]
    print(f"correctness: {outcomes.count('passed')} of {len(outcomes)} tests passed")
    return not any(code not in (0, NO_TESTS) for code in codes)


def sanitized(evidence: Evidence, args) -> bool:
    def record(name: str, entry: dict) -> None:
        evidence.add("sanitize", "runs", name, entry)
        found = entry.get("findings", "")
        print(f"sanitize {name}: ok {entry['ok']}, findings {found}, {entry['seconds']} s", flush=True)
        if not entry["ok"]:
            print(entry.get("where", ""), entry.get("output", "")[:4000], sep="\n")

    return sanitize.run(record, args.tools.split(","), shlex.split(args.sanitizer_flags))


def fuzzed(evidence: Evidence, args) -> bool:
    found = fuzz.run(args.examples, args.fuzz_workers, args.device, args.reference or args.device)
    evidence.set("fuzz", **found)
    for failure in found["failures"][:10]:
        print(*(f"{key}: {value}" for key, value in failure.items()), sep="\n", end="\n\n")
    print(f"fuzz: {found['examples']} examples, {len(found['failures'])} failures, {found['launches']} launches")
    return found["examples"] >= args.examples and not found["failures"]


def bench(evidence: Evidence, args) -> bool:
    from benchmarks.bench import GROUPS, run

    def record(name: str, row: dict) -> None:
        evidence.add("bench", "rows", name, row)

    failed = run(kernel.load(), GROUPS, record, device=args.device, tiny=args.tiny)
    if failed:
        evidence.set("bench", failed=failed)
    findings = bars.judge(evidence.data["parts"]["bench"].get("rows", {}))
    print(*findings, sep="\n")
    return not failed and all(finding.ok for finding in findings)


PARTS = {"correctness": correctness, "sanitize": sanitized, "fuzz": fuzzed, "bench": bench}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="the record to merge into")
    parser.add_argument("--workers", type=int, default=WORKERS, help="pytest processes side by side")
    parser.add_argument("--tools", default=",".join(sanitize.TOOLS), help="compute-sanitizer tools")
    parser.add_argument("--sanitizer-flags", default="", help="further flags for compute-sanitizer, recorded")
    parser.add_argument("--examples", type=int, default=fuzz.EXAMPLES, help="calls that fuzz draws")
    parser.add_argument("--fuzz-workers", type=int, default=fuzz.WORKERS, help="processes of fuzz side by side")
    parser.add_argument("--reference", help="where fuzz computes float64: cuda or cpu (default: the device)")
    parser.add_argument("--only", help="pytest's -k: for a closer look, not for evidence")
    parser.add_argument("--device", default="cuda", help="cpu with --tiny tries the harness itself")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    os.environ.pop("LOCAL_KERNELS", None)  # what is recorded is a build of these sources
    cce = kernel.load()
    evidence = Evidence(args.results, torch_ext_sha256())
    good = True
    for part in args.parts:
        evidence.begin(part, **environment(cce))
        begun = time.monotonic()
        try:
            passed = PARTS[part](evidence, args)
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            evidence.set(part, failed=f"{type(error).__name__}: {error}")
            passed = False
        evidence.set(part, seconds=round(time.monotonic() - begun, 1))
        print(f"{part}: {'passed' if passed else 'FAILED'} in {time.monotonic() - begun:.0f} s", flush=True)
        good &= passed
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
