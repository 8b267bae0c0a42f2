"""compute-sanitizer over `sanitize_target.py`, with the caching allocator off: every tensor has its own bounds."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.kernel import ROOT, local_build

TARGET = ROOT / "benchmarks" / "sanitize_target.py"
TOOLS = ("memcheck", "racecheck", "initcheck")
SECONDS = 150  # a run that takes longer is killed and counts as failed: the slowest that ended took 43
SHARES = 6  # processes that compile every kernel beforehand
# The last line that a tool prints: memcheck's and initcheck's, racecheck's.
SUMMARIES = (r"ERROR SUMMARY: (\d+) error", r"RACECHECK SUMMARY: (\d+) hazard")
PLANTED = re.compile(r"Invalid __global__ write")
# Triton hands warps over to their partition by a flag in shared memory, on either side of named barriers that racecheck
# does not follow. All accesses are the compiler's: reads have the line on which the kernel begins, writes that or the
# one that starts the partitions. What a partition does has lines above the kernel, or of another file.
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+\w+ in (\w+\.py):(\d+)")
SEPARATOR = "\n========= \n"  # of reports
KERNELS = ROOT / "torch-ext" / "cut_cross_entropy" / "backends" / "triton" / "hopper"
# Where a finding lies, as every tool prints it: "at kernel+0x1a0 in file.py:12" or "in void kernel<...>".
WHERE = re.compile(r"\bat (?:void )?([\w:]+)[+(<]")


def find_sanitizer() -> str:
    """compute-sanitizer on PATH or in a CUDA toolkit."""
    candidates = [shutil.which("compute-sanitizer")]
    for folder in ("bin", "compute-sanitizer"):
        candidates += map(str, sorted(Path("/usr/local").glob(f"cuda*/{folder}/compute-sanitizer")))
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError("compute-sanitizer: not on PATH and not under /usr/local/cuda*")


def flags(sanitizer: str, tool: str) -> list[str]:
    """Padding between allocations where this version can; errors of API calls are torch's to report."""
    chosen = ["--tool", tool, "--error-exitcode", "86", "--target-processes", "application-only"]
    if tool == "memcheck":
        known = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
        chosen += ["--padding", "4096"] if "--padding" in known else []
        chosen += ["--report-api-errors", "no"] if "--report-api-errors" in known else []
    return chosen


def parse(tool: str, output: str) -> dict:
    """findings: what the tool counted, None if it printed no summary; the kernels and the output if there are any."""
    output = output.replace(f"{ROOT}/", "")
    counts = [int(count) for pattern in SUMMARIES for count in re.findall(pattern, output)]
    entry = {"tool": tool, "findings": counts[-1] if counts else None}
    ours, compilers = [], []
    for report in output.split(SEPARATOR):
        (compilers if of_the_compiler(report) else ours).append(report)
    if entry["findings"] and compilers:
        output = SEPARATOR.join(ours)
        entry |= {"findings": entry["findings"] - len(compilers), "of the compiler": SEPARATOR.join(compilers)[:3000]}
    if entry["findings"] != 0:
        entry["where"] = dict(Counter(WHERE.findall(output)).most_common(12))
        entry["output"] = output[:3000] + ("\n...\n" + output[-3000:] if len(output) > 6000 else output[3000:])
    return entry


def of_the_compiler(report: str) -> bool:
    """Whether this is about the flag by which a specialised kernel hands its warps over."""
    accesses = ACCESS.findall(report)
    if len({(kernel, file) for _, kernel, file, _ in accesses}) != 1:
        return False
    _, kernel, file, _ = accesses[0]
    lines = (KERNELS / file).read_text().splitlines() if (KERNELS / file).exists() else []
    begins = next((i for i, line in enumerate(lines, 1) if line.startswith(f"def {kernel}(")), math.inf)
    return all(int(line) == begins if kind == "Read" else int(line) >= begins for kind, _, _, line in accesses)


def start(command: list[str], report: Path, **env: str) -> tuple[subprocess.Popen, float]:
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SANITIZE_REPORT": str(report), **env}
    out = report.with_suffix(".log").open("w")
    process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    return process, time.monotonic()


def run(record: Callable[[str, dict], None], tools: Sequence[str] = TOOLS, extra: Sequence[str] = ()) -> bool:
    """Every tool over every case, and the planted write under memcheck, all at once. True if each did what it should.

    `extra` flags go to every tool and are recorded.
    Processes without a sanitizer run first: they show that the cases run, and leave every kernel compiled.
    """
    local_build()
    sanitizer = find_sanitizer()
    python = [sys.executable, str(TARGET)]
    with tempfile.TemporaryDirectory() as scratch:
        plain = [start([*python, "options", f"{i}/{SHARES}"], Path(scratch) / f"plain{i}.json") for i in range(SHARES)]
        codes = [finish(process, begun)[0] for process, begun in plain]
        entry = {"exit": codes, "seconds": round(time.monotonic() - plain[0][1], 1), "ok": not any(codes)}
        if not entry["ok"]:
            logs = [path.read_text() for path in sorted(Path(scratch).glob("plain*.log"))]
            entry["output"] = "\n".join(log[-1000:] for log, code in zip(logs, codes, strict=True) if code)
        record("without", entry)
        if not entry["ok"]:
            return False

        runs = {tool: (tool, "options") for tool in tools} | {"planted": ("memcheck", "planted")}
        started = {}
        for name, (tool, mode) in runs.items():
            chosen = [*flags(sanitizer, tool), *extra]
            env = {"SANITIZE_SHOW_WRITES": "1"} if tool == "initcheck" else {}
            started[name] = start([sanitizer, *chosen, *python, mode], Path(scratch) / f"{name}.json", **env), chosen
        good = True
        for name in sorted(started, key=lambda name: name != "planted"):
            (process, begun), chosen = started[name]
            code, seconds = finish(process, begun)
            entry = {"exit": code, "seconds": seconds, "flags": chosen}
            entry |= judge(name, runs[name][0], Path(scratch) / f"{name}.json")
            good &= entry["ok"]
            record(name, entry)
    return good


def finish(process: subprocess.Popen, begun: float) -> tuple[int | None, float]:
    """Exit status and seconds; None if it ran past SECONDS."""
    try:
        code = process.wait(timeout=max(1.0, SECONDS - (time.monotonic() - begun)))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and what it watches
        process.wait()
        code = None
    return code, round(time.monotonic() - begun, 1)


def judge(name: str, tool: str, report: Path) -> dict:
    """The tool's count, what the target ran, and whether that is as it should be."""
    output = report.with_suffix(".log").read_text()
    entry = parse(tool, output)
    if name == "planted":
        entry["found"] = bool(PLANTED.search(output))
        return entry | {"ok": entry["found"]}
    ran = json.loads(report.read_text()) if report.exists() else {"cases": [], "launches": {}}
    return entry | ran | {"ok": entry["findings"] == 0 and bool(ran["cases"]) and bool(ran["launches"])}
