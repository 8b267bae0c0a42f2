"""Draw docs/figures/sweep.png and rewrite the README's measured tables from the recorded evidence.

    python benchmarks/figures.py            write both
    python benchmarks/figures.py --check    fail if a table in the README is not what the evidence says

A table lives between `<!-- measured:NAME -->` and `<!-- /measured -->`; NAME is one of TABLES below. What lies between
is replaced whole, so that no number is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bars import FLOOR_8, LARGE, MIB, floor_rate, host_median, milliseconds, ratio, workspace_of  # noqa: E402
from benchmarks.evidence import RESULTS  # noqa: E402

README = ROOT / "README.md"
FIGURE = ROOT / "docs" / "figures" / "sweep.png"
GIB = 1 << 30
ERRORS = ("recompute", "single_pass", "materialized_bf16")


def table(head: list[str], lines: list[list[str]]) -> str:
    """Markdown, numbers to the right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines]) + "\n"


def sweep_rows(rows: dict) -> list[dict]:
    return sorted((row for name, row in rows.items() if name.startswith("sweep/")), key=lambda row: row["n"])


def shapes(part: dict) -> str:
    lines = []
    for name in LARGE:
        row = part["rows"][name]
        lines.append([
            name, f"{row['n']:,}", f"{row['v']:,}", f"{row['d']:,}",
            f"{milliseconds(row, 'forward'):.1f}", f"{ratio('forward', z=1)(row):.3f}",
            f"{milliseconds(row, 'step'):.1f}", f"{ratio('step', **FLOOR_8)(row):.3f}",
            f"{workspace_of(row, 'step') / MIB:,.0f}", f"{workspace_of(row, 'forward') / MIB:.1f}",
            f"{floor_rate(**FLOOR_8)(row):.0f}",
        ])  # fmt: skip
    head = ["shape", "N", "V", "D", "forward, ms", "/ its GEMM", "forward + backward, ms", "/ its four GEMMs", "MiB",
            "MiB, forward alone", "TF/s of the GEMMs"]  # fmt: skip
    return table(head, lines)


def sweep(part: dict) -> str:
    def cells(row: dict, name: str) -> list[str]:
        if name in row["failed"]:
            return [row["failed"][name]] * 2
        return [f"{row['bytes'][name]['peak'] / GIB:.2f}", f"{milliseconds(row, name):.1f}"]

    head = ["tokens", "peak GiB", "ms", "materialized: peak GiB", "ms"]
    rows = sweep_rows(part["rows"])
    return table(head, [[f"{row['n']:,}", *cells(row, "kernel"), *cells(row, "materialized")] for row in rows])


def accuracy(part: dict) -> str:
    rows = {name.removeprefix("error/"): row for name, row in part["rows"].items() if name.startswith("error/")}
    lines = [
        [name, *(f"{row[of][what]:.1e}" for of in ERRORS for what in ("loss", "de", "dc"))]
        for name, row in rows.items()
    ]
    return table(
        ["shape", *(f"{of.replace('_', ' ')}: {what}" for of in ERRORS for what in ("loss", "dE", "dC"))], lines
    )


BESIDE_HOST = {
    "materialized_bf16": "of the materialized loss",
    "captured": "of the same step replayed from a CUDA graph",
}


def sizes_of(row: dict) -> str:
    return f"N = {row['n']:,}, V = {row['v']:,}, D = {row['d']:,}"


def rest(part: dict) -> str:
    small, ignored, host = (part["rows"][name] for name in ("small", "ignored", "host"))
    against_bf16 = ratio("step", materialized_bf16=1)(small)
    lines = [[f"small ({sizes_of(small)}) by recompute, time over materialized bf16", f"{against_bf16:.2f}"]]
    for share in (10, 50, 90):
        over_none = ratio(f"ignored_{share}", ignored_0=1)(ignored)
        lines.append([f"{share} % of targets ignored (llama3-8b), time over none ignored", f"{over_none:.3f}"])
    lines += [
        [f"host time of a step ({sizes_of(host)}), µs", f"{host_median(host):.0f}"],
        *(
            [f"{label}, µs", f"{median(host['samples_us'][key]):.0f}"]
            for key, label in BESIDE_HOST.items()
            if key in host["samples_us"]
        ),
        ["Triton launches per step", f"{sum(host.get('triton_launches', {}).values())}"],
        ["device operations per step, by the profiler", f"{host['device_operations']}"],
    ]
    return table(["what", "measured"], lines)


def environment(part: dict, days: str | None = None) -> str:
    versions = f"driver {part['driver']}, torch {part['torch']}, triton {part['triton']}"
    return f"{part['device']}, {versions}, {days or part['date'][:10]}; medians, bf16, 1 % of the targets ignored.\n"


TABLES = {"environment": environment, "shapes": shapes, "sweep": sweep, "accuracy": accuracy, "rest": rest}


def fill(text: str, part: dict, tables=TABLES, kind: str = "measured") -> str:
    """The text with every table marked as of this kind replaced by what was measured."""

    def replacement(match: re.Match) -> str:
        name = match[2]
        if name not in tables:
            raise ValueError(f"{kind}:{name}: unknown, accepted are {', '.join(tables)}")
        return match[1] + tables[name](part) + match[3]

    return re.sub(rf"(<!-- {kind}:([\w-]+) -->\n).*?(<!-- /{kind} -->)", replacement, text, flags=re.DOTALL)


def draw(part: dict, path: Path) -> None:
    """Peak memory and time against tokens, both axes logarithmic; where the card was too small, a cross."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sweep_rows(part["rows"])
    figure, (memory, time) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    card, labels = part["memory_bytes"] / GIB, {"size": 9, "textcoords": "offset points"}
    styles = {
        "kernel": ("cut cross-entropy", "#1f6fb4", "o"),
        "materialized": ("materialized, fp32 softmax", "#c44e52", "s"),
    }
    for name, (label, color, marker) in styles.items():
        ran = [row for row in rows if name not in row["failed"]]
        tokens = [row["n"] for row in ran]
        peaks, times = [row["bytes"][name]["peak"] / GIB for row in ran], [milliseconds(row, name) for row in ran]
        memory.plot(tokens, peaks, color=color, marker=marker, label=label)
        time.plot(tokens, times, color=color, marker=marker, label=label)
        for row in (row for row in rows if name in row["failed"]):
            memory.plot(row["n"], card, color=color, marker="x", markersize=10, mew=2.5, linestyle="none")
            memory.annotate(row["failed"][name], (row["n"], card), (4, 8), ha="right", color=color, **labels)
    memory.axhline(card, color="0.5", linestyle=":", linewidth=1)
    memory.annotate("the card", (rows[0]["n"], card), (0, 5), color="0.4", **labels)
    for axis, title in ((memory, "peak memory, GiB (inputs and gradients included)"), (time, "forward + backward, ms")):
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.set_xticks([row["n"] for row in rows], [f"{row['n'] // 1024}k" for row in rows])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axis.grid(alpha=0.3)
    memory.set(ylim=(0.5, 2.5 * card), yticks=(1, 2, 5, 10, 20, 50, 100))
    time.set_yticks((5, 10, 20, 50, 100, 200, 500))
    time.legend(loc="upper left")
    figure.suptitle(f"V = {rows[0]['v']:,}, D = {rows[0]['d']:,}, bf16, {part['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="compare the README with the evidence, write nothing")
    args = parser.parse_args()
    part = json.loads(args.results.read_text())["parts"]["bench"]
    text = README.read_text()
    filled = fill(text, part)
    if args.check:
        if filled != text:
            print(f"{README.name}: measured tables differ from {args.results.name}; run benchmarks/figures.py")
        return int(filled != text)
    README.write_text(filled)
    draw(part, FIGURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
