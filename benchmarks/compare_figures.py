"""Draw docs/figures/compare*.png and fill the tables of docs/comparison.md (and the README) from compare.json.

    python benchmarks/compare_figures.py            write all of them
    python benchmarks/compare_figures.py --check    fail if a table is not what was recorded

A table lives between `<!-- compared:NAME -->` and `<!-- /compared -->`; NAME is one of TABLES below.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bars import FLOOR_8, MIB, milliseconds, ratio, step_mib  # noqa: E402
from benchmarks.compare import AS, COMPARED, FLOOR_6, GROUPS, OURS, PEERS, RESULTS, label  # noqa: E402
from benchmarks.figures import environment, fill, table  # noqa: E402

TEXTS = (ROOT / "README.md", ROOT / "docs" / "comparison.md")
FIGURES = ROOT / "docs" / "figures"
FAILS = "fails"
SWEEPS = {
    "tokens-4096": "tokens, V = 128256, D = 4096",
    "tokens-2048": "tokens, V = 128256, D = 2048",
    "vocabulary": "vocabulary, N = 8192, D = 2048",
    "ignored": "% of targets ignored, llama3-8b",
}

Parts = dict[str, dict]  # of compare.json: a point's sizes, environment and entries


def over_floor(row: dict) -> float:
    return ratio("step", **FLOOR_6)(row)


def ran(row: dict) -> bool:
    return "samples_ms" in row


def name_of(row: dict) -> str:
    """The label with the library's version; torch's own is the record's."""
    library, comma, rest = row["label"].partition(",")
    version = "" if library.startswith("torch") or "version" not in row else f" {row['version']}"
    return f"{library}{version}{comma}{rest}{'' if row['exact'] else ' (approximate)'}"


# Tables.


def shapes(parts: Parts) -> str:
    """Milliseconds, their ratio to the three bare GEMMs, and MiB over inputs and gradients."""
    recorded = {name: parts[name] for name in COMPARED if name in parts}

    def cell(row: dict | None) -> str:
        if row is None:
            return ""
        return f"{milliseconds(row, 'step'):.1f} ({over_floor(row):.2f}), {step_mib(row):,.0f}" if ran(row) else FAILS

    lines = []
    for entry in (*OURS, *PEERS):
        rows = [part["entries"].get(entry) for part in recorded.values()]
        if any(rows):
            lines.append([name_of(next(filter(None, rows))), *map(cell, rows)])
    return table(["ms (over three GEMMs), MiB", *recorded], lines)


def floors(parts: Parts) -> str:
    """The bare GEMMs, over all rounds of a shape."""
    lines = []
    for name in COMPARED:
        rows = [row for row in parts.get(name, {"entries": {}})["entries"].values() if ran(row)]
        if rows:
            six, eight = (
                median(sum(k * milliseconds(row, step) for step, k in floor.items()) for row in rows)
                for floor in (FLOOR_6, FLOOR_8)
            )
            sizes = (f"{parts[name][size]:,}" for size in ("n", "v", "d"))
            lines.append([name, *sizes, f"{six:.1f}", f"{eight:.1f}"])
    return table(["shape", "N", "V", "D", "three GEMMs, ms", "four GEMMs, ms"], lines)


def errors(parts: Parts) -> str:
    recorded = [
        name for name in COMPARED if any("error" in row for row in parts.get(name, {}).get("entries", {}).values())
    ]
    lines = []
    for entry in (*OURS, *PEERS):
        rows = [parts[name]["entries"].get(entry, {}) for name in recorded]
        if any("error" in row for row in rows):
            cells = [
                f"{row['error'][what]:.1e}" if "error" in row else FAILS
                for row in rows
                for what in ("loss", "de", "dc")
            ]
            lines.append([name_of(next(row for row in rows if row)), *cells])
    return table(["relative error", *(f"{name}: {what}" for name in recorded for what in ("loss", "dE", "dC"))], lines)


def plans(parts: Parts) -> str:
    """What the planner chose and foretold, and what was measured."""
    lines = []
    for shape in (name for name in COMPARED if name in parts):
        for row in (parts[shape]["entries"].get(entry, {}) for entry in OURS):
            if "plan" in row:
                planned = (f"{row['planned']['bytes'] / MIB:,.0f}", f"{row['planned']['milliseconds'] or math.nan:.1f}")
                found = (f"{step_mib(row):,.0f}", f"{milliseconds(row, 'step'):.1f}") if ran(row) else (FAILS, FAILS)
                pairs = (f"{a} / {b}" for a, b in zip(planned, found, strict=True))
                lines.append([shape, row["label"].partition(", ")[2], *pairs, row["plan"][0].partition(" panels")[0]])
    return table(["shape", "budget", "MiB planned / measured", "ms planned / measured", "plan"], lines)


def quicker(parts: Parts) -> str:
    """Exact peers that took less time than this kernel in as much memory, or where it was not timed in as little.

    By the ratio to the bare GEMMs of their own rounds, or by milliseconds: the clock may change from entry to entry.
    """

    def figures(row: dict) -> list[str]:
        return [f"{over_floor(row):.2f}", f"{milliseconds(row, 'step'):.1f}", f"{step_mib(row):,.0f}"]

    lines = []
    for point, part in parts.items():
        rows = {name: row for name, row in part["entries"].items() if ran(row)}
        for peer in (rows[name] for name in rows if name in PEERS and rows[name]["exact"]):
            ours = [row for name, row in rows.items() if name not in PEERS and step_mib(row) <= step_mib(peer)]
            measures = (over_floor, partial(milliseconds, step="step"))
            if not ours:
                lines.append([point, name_of(peer), *figures(peer), "not timed", "", ""])
            elif any(measure(peer) < min(map(measure, ours)) for measure in measures):
                lines.append([point, name_of(peer), *figures(peer), *figures(min(ours, key=over_floor))])
    return table(["point", "peer", "over GEMMs", "ms", "MiB", "here: over GEMMs", "ms", "MiB"], lines)


def environments(parts: Parts) -> str:
    """That of the first part, with the days of all entries."""
    days = [row.get("date", part["date"])[:10] for part in parts.values() for row in part["entries"].values()]
    return environment(next(iter(parts.values())), " to ".join(sorted({min(days), max(days)})))


def failures(parts: Parts) -> str:
    """Which peer failed where, in its own words."""
    told: dict[tuple[str, str], list[str]] = {}
    for point, part in parts.items():
        for row in part["entries"].values():
            if "failed" in row:
                told.setdefault((name_of(row), row["failed"]), []).append(point)
    lines = [[name, ", ".join(points), text.replace("|", "\\|")] for (name, text), points in told.items()]
    return table(["entry", "where", "message"], lines)


def points_of(group: str, parts: Parts) -> dict[int, dict]:
    """Entries of a sweep's points, by what is swept."""
    return {int(name.partition("/")[2]): parts[name]["entries"] for name in GROUPS[group] if name in parts}


def sweep(group: str, parts: Parts) -> str:
    points = points_of(group, parts)
    if not points:
        return "Not measured.\n"
    names = list(dict.fromkeys(name for entries in points.values() for name in entries))

    def cell(row: dict | None) -> str:
        if row is None:
            return ""
        return f"{over_floor(row):.2f}, {step_mib(row):,.0f}" if ran(row) else FAILS

    lines = [[f"{x:,}", *(cell(entries.get(name)) for name in names)] for x, entries in points.items()]
    return table([SWEEPS[group].partition(",")[0], *map(label, names)], lines)


TABLES = {
    "environment": environments,
    **{function.__name__: function for function in (shapes, floors, plans, errors, quicker, failures)},
    **{group: partial(sweep, group) for group in SWEEPS},
}

# Figures. A family of entries has one colour; what differs within it, a marker.

SLOWEST = 12  # over the three GEMMs: what takes longer is named below its panel

STYLES = {
    "this": ("#1f6fb4", "os^Dvp"),
    "torch": ("#c44e52", "osD^v"),
    "Liger": ("#dd8a1f", "os^"),
    "FLA": ("#8c6bb1", "os"),
    "Apple": ("#777777", "os"),
    "verl": ("#3a9a5b", "os^v"),
    "QuACK": ("#222222", "os"),
}


def styles(names) -> dict[str, dict]:
    """Colour and marker of every entry."""
    found, used = {}, dict.fromkeys(STYLES, 0)
    for name in names:
        family = next(family for family in STYLES if label(name).startswith(family))
        color, markers = STYLES[family]
        found[name] = {"color": color, "marker": markers[used[family] % len(markers)]}
        used[family] += 1
    return found


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot().close(figure)


def draw_shapes(parts: Parts, path: Path) -> None:
    """Time against memory of the exact entries, a panel for each shape; both axes logarithmic."""
    plt = pyplot()
    names = [name for name in (*OURS, *PEERS) if name not in PEERS or PEERS[name].exact]
    style = styles(names)
    figure, panels = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    panels = list(panels.flat)
    for panel, (shape, part) in zip(panels, ((name, parts[name]) for name in COMPARED if name in parts), strict=False):
        rows = {name: part["entries"][name] for name in names if name in part["entries"]}
        measured = {name: row for name, row in rows.items() if ran(row) and step_mib(row) > 0}
        if not measured:
            continue
        # A line through what the planner chose; `recompute` was asked for.
        chosen = [row for name, row in measured.items() if name in OURS and name != "recompute"]
        ours = sorted((step_mib(row), over_floor(row)) for row in chosen)
        panel.plot(*zip(*ours, strict=True), color=STYLES["this"][0], linewidth=1)
        for name, row in measured.items():
            panel.plot(
                step_mib(row), over_floor(row), linestyle="none", markersize=8 if name in OURS else 6, **style[name]
            )
        eight = median(ratio("step", **FLOOR_6)(row) / ratio("step", **FLOOR_8)(row) for row in measured.values())
        for y, text in ((1, "three GEMMs"), (eight, "four GEMMs")):
            panel.axhline(y, color="0.5", linestyle=":", linewidth=1)
            panel.annotate(text, (1, y), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                           ha="right", size=8, color="0.4")  # fmt: skip
        failed = [label(name) for name, row in rows.items() if not ran(row)]
        beyond = [
            f"{label(name)}, {over_floor(row):.0f}" for name, row in measured.items() if over_floor(row) > SLOWEST
        ]
        notes = [f"{kind}: {'; '.join(told)}" for kind, told in (("fails", failed), ("above", beyond)) if told]
        panel.set_xlabel("\n".join(textwrap.fill(note, 80) for note in notes), size=8, color="0.3")
        sizes = f"N = {part['n']:,}, V = {part['v']:,}, D = {part['d']:,}"
        panel.set(xscale="log", yscale="log", ylabel="time over the three bare GEMMs")
        panel.set_title(f"{shape}: {sizes}", size=11)
        panel.set_yticks((1, 1.5, 2, 3, 5, 8), minor=False)
        panel.set_ylim(0.9, SLOWEST)
        panel.xaxis.set_major_locator(plt.matplotlib.ticker.LogLocator())
        panel.minorticks_off()
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        panel.tick_params("x", labelsize=8)
        panel.grid(alpha=0.3)
    legend = panels[-1]
    legend.axis("off")
    handles = [legend.plot([], [], linestyle="none", label=label(name), **style[name])[0] for name in names]
    legend.legend(handles=handles, loc="center", ncols=2, fontsize=8, frameon=False)
    device = next(iter(parts.values()))["device"]
    figure.suptitle(f"Forward and backward: time against MiB over inputs and gradients, bf16, {device}")
    save(figure, path)


def tick(group: str, x: int) -> str:
    return f"{x // 1024}k" if group.startswith("tokens") else f"{x / 1000:.0f}k" if group == "vocabulary" else f"{x}"


def draw_sweeps(parts: Parts, path: Path) -> None:
    """Time over the three bare GEMMs of the same rounds along each sweep; a point is missing where an entry failed."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(SWEEPS), figsize=(17, 4.6), layout="constrained", sharey=False)
    every = dict.fromkeys(name for group in SWEEPS for entries in points_of(group, parts).values() for name in entries)
    style = styles(every)
    for panel, (group, title) in zip(panels, SWEEPS.items(), strict=True):
        points = points_of(group, parts)
        for name in every:
            xy = [(x, over_floor(e[name])) for x, e in points.items() if name in e and ran(e[name])]
            if xy:
                dashed = "--" if name.startswith(AS) else "-"
                panel.plot(
                    *zip(*xy, strict=True), dashed, label=label(name), linewidth=1.2, markersize=5, **style[name]
                )
        panel.axhline(1, color="0.5", linestyle=":", linewidth=1)
        panel.set(
            title=title, ylabel="time over the three bare GEMMs", xscale="linear" if group == "ignored" else "log"
        )
        panel.set_xticks(list(points), [tick(group, x) for x in points], size=8)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*max((panel.get_legend_handles_labels() for panel in panels), key=lambda found: len(found[0])),
                  loc="outside lower center", ncols=6, frameon=False)  # fmt: skip
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="compare the texts with the record, write nothing")
    args = parser.parse_args()
    if not args.results.exists():
        parser.error(f"{args.results.name}: not there; benchmarks/compare.py on a CUDA machine writes it")
    parts = json.loads(args.results.read_text())["parts"]
    stale = []
    for path in TEXTS:
        text = path.read_text()
        filled = fill(text, parts, TABLES, "compared")
        if filled != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(filled)
    if args.check:
        print(*(f"{name}: tables differ from {args.results.name}; run benchmarks/compare_figures.py" for name in stale))
        return bool(stale)
    draw_shapes(parts, FIGURES / "compare.png")
    draw_sweeps(parts, FIGURES / "compare-sweeps.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
