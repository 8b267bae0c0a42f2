"""This kernel and its peers side by side on one GPU: `python -m benchmarks.compare [GROUP ...]`.

Groups: the shapes, then sweeps over tokens, over the vocabulary and over the share of ignored targets. Every entry is
timed in rounds with the bare GEMMs z, dE and dC, and writes its row before the next one starts; one that fails says why
in its row. `--tiny --device cpu` runs everything at toy sizes, to try the harness itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kernel, states, truth  # noqa: E402
from benchmarks.bars import FLOOR_8, MIB, ratio, workspace_of  # noqa: E402
from benchmarks.evidence import Evidence, environment  # noqa: E402
from benchmarks.memory import release, step_memory  # noqa: E402
from benchmarks.peers import PEERS, Loss  # noqa: E402
from benchmarks.shapes import GIB, SHAPES, Shape  # noqa: E402
from benchmarks.timing import gemm_floors, interleaved, training_step  # noqa: E402
from tools.source_hash import torch_ext_sha256  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "compare.json"
FLOOR_6 = dict.fromkeys(("z", "de", "dc"), 1)
SECONDS = 1.0  # of timed rounds for an entry
ROUNDS = (3, 10)  # how many rounds that may be

COMPARED = {name: SHAPES[name] for name in ("llama3-8b", "gemma2-2b", "wide", "odd")}
COMPARED["llama2"] = Shape(8192, 32000, 4096, 200 * MIB)
BUDGETS = {  # bytes over inputs and gradients: lean, ample
    "llama3-8b": (int(1.1 * GIB), 3 * GIB),
    "gemma2-2b": (int(2.25 * GIB), int(4.5 * GIB)),
    "wide": (int(1.75 * GIB), 3 * GIB),
    "odd": (int(1.75 * GIB), 3 * GIB),
    "llama2": (320 * MIB, 600 * MIB),
}
WITH_ERRORS = ("llama3-8b", "gemma2-2b")

OURS = {
    "recompute": "this kernel, recompute",
    "panel": "this kernel, panel budget",
    "lean": "this kernel, lean budget",
    "ample": "this kernel, ample budget",
    "default": "this kernel, default budget",
}
FAST = ("torch_bf16", "torch_fp32", "liger_8")
AS = "as-"  # this kernel, in the memory that the named peer took
# On the shapes it is given the memory of these.
MATCHED = ("liger", "liger_8", "fla_16bit", "torch_compile", "torch_chunked", "quack")
SWEPT = ("default", *FAST, *(AS + name for name in FAST if name != "torch_fp32"))


@dataclass(frozen=True, slots=True)
class Point:
    """One set of inputs, and what runs on it, in order."""

    shape: Shape
    entries: tuple[str, ...] = SWEPT
    ignored: float = 0.01
    errors: bool = False
    budgets: dict[str, int] = field(default_factory=dict)


def budgets_of(name: str) -> dict[str, int]:
    """The panel budget holds an fp32 dE and a 16-bit panel of 4096 columns."""
    shape, (lean, ample) = COMPARED[name], BUDGETS[name]
    return {"panel": 4 * shape.n * shape.d + 2 * shape.n * 4096, "lean": lean, "ample": ample}


def tokens(d: int) -> dict[str, Point]:
    return {f"tokens-{d}/{1024 << k}": Point(Shape(1024 << k, 128256, d)) for k in range(8)}


ENTRIES = (*OURS, *PEERS, *(AS + name for name in MATCHED))
GROUPS: dict[str, dict[str, Point]] = {
    name: {name: Point(shape, ENTRIES, errors=name in WITH_ERRORS, budgets=budgets_of(name))}
    for name, shape in COMPARED.items()
}
GROUPS["tokens-4096"] = tokens(4096)
GROUPS["tokens-2048"] = tokens(2048)
GROUPS["vocabulary"] = {
    f"vocabulary/{v}": Point(Shape(8192, v, 2048)) for v in (32000, 65536, 128256, 151936, 200064, 262144)
}
GROUPS["ignored"] = {f"ignored/{share}": Point(COMPARED["llama3-8b"], ignored=share / 100) for share in (0, 50, 90)}


class Record(Evidence):
    """Entries of peers outlive a change of these sources: each was timed in rounds with bare GEMMs of its own."""

    def __init__(self, path: Path, sha256: str):
        super().__init__(path, sha256)
        if self.data["parts"] or not self.path.exists():
            return
        for name, part in json.loads(self.path.read_text())["parts"].items():
            peers = {entry: row for entry, row in part.get("entries", {}).items() if entry in PEERS}
            if peers:
                self.data["parts"][name] = part | {"entries": peers}


class Lost(RuntimeError):
    """The device answers no more, as after an illegal address: what follows in this process would fail too."""


def message(error: Exception) -> str:
    """Type and text in one line of 300 characters, files without their folders."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(?<![\w:/])(?:/[\w.+-]+)+/", "", text)[:300]


def label(name: str) -> str:
    if name in OURS:
        return OURS[name]
    return f"this kernel, memory of {PEERS[name.removeprefix(AS)].label}" if name.startswith(AS) else PEERS[name].label


class Compare:
    def __init__(self, cce, evidence: Evidence, *, device: str = "cuda", tiny: bool = False, seconds: float = SECONDS):
        self.cce, self.evidence, self.device, self.tiny = cce, evidence, device, tiny
        self.seconds = 0.02 if tiny else seconds
        self.environment = environment(cce)

    def run(self, part: str, point: Point, names: list[str], *, fresh: bool = True) -> None:
        """Measure the named entries. Unless `fresh`, entries of an earlier run stay beside them."""
        shape = point.shape.tiny() if self.tiny else point.shape
        release()
        s = states.make(shape.n, shape.v, shape.d, torch.bfloat16, self.device, ignored=point.ignored)
        exact = truth.truth(s.e, s.c, s.targets) if point.errors else None
        s.e.requires_grad_(), s.c.requires_grad_()
        if fresh or part not in self.evidence.data["parts"]:
            sizes = {"n": shape.n, "v": shape.v, "d": shape.d, "v_aligned": shape.v_aligned, "ignored": point.ignored}
            self.evidence.begin(part, **self.environment, **sizes)
        entries = self.evidence.data["parts"][part].setdefault("entries", {})
        for name in names:
            if name.startswith(AS) and "bytes" not in entries.get(name.removeprefix(AS), {}):
                print(
                    f"{part:<18} {name:<14} left out: the memory of {name.removeprefix(AS)} was not measured",
                    flush=True,
                )
                continue
            row = {"label": label(name), "exact": name not in PEERS or PEERS[name].exact}
            row["date"] = self.environment["date"]
            try:
                for found in self.measured(name, point, shape, s, exact, entries):
                    row |= found
            except Exception as error:
                row["failed"] = message(error)
            s.e.grad = s.c.grad = None
            self.evidence.add(part, "entries", name, row)
            print(summary(part, name, row), flush=True)
            try:
                release()
            except RuntimeError as error:
                raise Lost(f"{part}, {name}: {message(error)}") from error

    def measured(self, name: str, point: Point, shape: Shape, s: states.States, exact, entries: dict):
        """The row of one entry, in pieces: what was found before a failure is kept."""
        if name in PEERS:
            yield {"version": PEERS[name].version()}
            function = PEERS[name].load()
            gc.freeze()  # what a library imports need not be visited by every later collection
        else:
            options = self.options(name, point, shape, entries)
            sizes = (shape.n, shape.v, shape.d, torch.bfloat16)
            plan = self.cce.plan(*sizes, device=self.device, scalar=True, **options)
            if plan.schedule == "recompute" and not plan.kept:
                # Its backward plans anew, once it knows the count of valid rows.
                known = {"schedule": "recompute", "kept": 0, "valid": int((s.targets != -100).sum())}
                plan = self.cce.plan(*sizes, device=self.device, **options | known)
            planned = {"bytes": plan.workspace, "milliseconds": plan.milliseconds}
            yield {"budget": options.get("workspace"), "plan": str(plan).splitlines(), "planned": planned}
            function = partial(self.cce.linear_cross_entropy, **options)

        leaves = (s.e, s.c)
        loss = partial(function, *leaves, s.targets)
        value = loss()
        value.backward()
        yield {"loss": value.item()}
        if exact is not None:
            yield {"error": truth.errors(value, s.e.grad, s.c.grad, exact)}
        del value
        yield {"bytes": {"step": asdict(step_memory(loss, leaves))}}
        yield self.timed(loss, leaves)

    def options(self, name: str, point: Point, shape: Shape, entries: dict) -> dict:
        """Schedule and workspace of an entry of this kernel."""
        if name == "recompute":
            return {"schedule": "recompute", "workspace": shape.workspace}
        if name == "default":
            return {}
        if name in point.budgets:
            return {"workspace": point.budgets[name]}
        return {"workspace": workspace_of(entries[name.removeprefix(AS)], "step")}

    def timed(self, loss: Loss, leaves) -> dict:
        """Samples of the step and of the bare GEMMs: in the same rounds if the card holds both, else one by one."""
        step = {"step": training_step(loss, leaves)}
        try:
            return {"interleaved": True} | self.rounds(step | gemm_floors(*(t.detach() for t in leaves)))
        except torch.OutOfMemoryError:
            pass  # the traceback holds the matrices until this clause is left
        release()
        samples = self.rounds(step)["samples_ms"]
        leaves[0].grad = leaves[1].grad = None
        release()
        samples |= self.rounds(gemm_floors(*(t.detach() for t in leaves)))["samples_ms"]
        return {"interleaved": False, "samples_ms": samples}

    def rounds(self, steps: dict) -> dict:
        first = interleaved(steps, repeats=1, warmup=0)  # loads what is not loaded yet; not kept
        fit = int(1e3 * self.seconds / sum(ms for (ms,) in first.values()))
        return {"samples_ms": interleaved(steps, repeats=min(max(fit, ROUNDS[0]), ROUNDS[1]), warmup=0)}


def summary(part: str, name: str, row: dict) -> str:
    cells = [f"{part:<18} {name:<14}"]
    if "samples_ms" in row:
        cells.append(f"{median(row['samples_ms']['step']):8.2f} ms, {ratio('step', **FLOOR_6)(row):.3f} of 6NVD,")
        cells.append(f"{ratio('step', **FLOOR_8)(row):.3f} of 8NVD")
    if "bytes" in row:
        cells.append(f"{workspace_of(row, 'step') / MIB:10.1f} MiB")
    if "error" in row:
        cells.append("error " + " ".join(f"{key} {value:.1e}" for key, value in row["error"].items()))
    return " ".join([*cells, f"FAILED {row['failed']}" if "failed" in row else ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--entries", help=f"only these, with commas between; also {', '.join(PEERS)}")
    parser.add_argument("--skip", default="", help="not these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the record to merge into")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timed rounds for an entry")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the harness")
    args = parser.parse_args()
    only = args.entries.split(",") if args.entries else None
    known = {*OURS, *PEERS, *(AS + name for name in PEERS)}
    for kind, given, accepted in (("group", args.groups, GROUPS), ("entry", only or (), known)):
        if unknown := [name for name in given if name not in accepted]:
            parser.error(f"unknown {kind} {', '.join(unknown)}; accepted: {', '.join(accepted)}")

    cce = kernel.load()
    evidence = Record(args.results, torch_ext_sha256())
    compare = Compare(cce, evidence, device=args.device, tiny=args.tiny, seconds=args.seconds)
    for group in args.groups or GROUPS:
        for part, point in GROUPS[group].items():
            names = [name for name in only or point.entries if name not in args.skip.split(",")]
            try:
                compare.run(part, point, names, fresh=only is None)
            except Lost as error:
                print(f"stopped: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
