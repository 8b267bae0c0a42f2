"""Bytes that the loss adds to a training step, against block size: `python -m tools.memory N V D DTYPE`.

Over the inputs e [N, D] and c [V, D] and the two returned gradients, for inputs of b bytes an element:

    materialized    3 b N V           logits, softmax and their gradient
    fused softmax   b N V             the logits alone: the gradient takes their place
    token blocks    b B V + 4 V D     logits of B tokens at a time; every block adds to the whole of dC, in fp32
    panels          b N B + 4 N D     logits of B vocabulary columns at a time; every panel adds to the whole of dE

The last two lines are this project's `single_pass` and `recompute`, and their bytes are not these formulas' but the
planner's. An fp32 gradient is its own accumulator and costs no second one; nor does one of few blocks.
"""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.source_hash import ROOT

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
DOCS, FIGURE = ROOT / "docs" / "memory.md", ROOT / "docs" / "figures" / "memory.png"
BEGIN, END = "<!-- begin: written by `python -m tools.memory --docs` -->", "<!-- end -->"
DOCS_TOKENS = 4 * 8192
MODELS = {
    "Llama 2 7B": (32000, 4096),
    "Mistral NeMo 12B": (131072, 5120),
    "Llama 3.1 8B": (128256, 4096),
    "Qwen 2.5 7B": (152064, 3584),
    "Gemma 2 9B": (256000, 3584),
}


def least_workspace(plan: Callable[..., object], *sizes, **call) -> int:
    """The smallest budget that the planner accepts: its refusal of any other names it."""
    try:
        plan(*sizes, workspace=-1, **call)
    except ValueError as error:
        if named := re.search(r"^workspace: .* at least (\d+)", str(error)):
            return int(named[1])
        raise
    raise AssertionError("a workspace of -1 bytes was accepted")


@dataclass(frozen=True, slots=True)
class Sizes:
    """One call of the loss.

    Attributes:
        n, v, d: tokens, vocabulary, hidden size.
        dtype: name of the inputs' dtype.
        plan: the kernel's planner, `cut_cross_entropy.plan`.
        device: "cuda" for the Triton kernels, "cpu" for the plain torch backend.
    """

    n: int
    v: int
    d: int
    dtype: str
    plan: Callable
    device: str = "cuda"

    @property
    def logits(self) -> int:
        return ITEMSIZE[self.dtype] * self.n * self.v

    @property
    def materialized(self) -> int:
        return 3 * self.logits

    @property
    def accumulated(self) -> int:
        """Bytes an element of a gradient that blocks add to and that is not fp32 itself."""
        return 4 * (ITEMSIZE[self.dtype] < 4)

    def token_blocks(self, tokens: int) -> int:
        return ITEMSIZE[self.dtype] * min(tokens, self.n) * self.v + self.accumulated * self.v * self.d

    def planned(self, workspace: int | None = None, schedule: str = "auto", scalar: bool = True):
        """The planner's answer for a budget in bytes, nothing kept between forward and backward.

        `scalar`: of a mean or sum that either schedule can serve.
        """
        sizes = (self.n, self.v, self.d, self.dtype)
        scalar = scalar and self.dtype != "float16"
        return self.plan(*sizes, device=self.device, workspace=workspace, kept=0, schedule=schedule, scalar=scalar)

    def leanest(self, schedule: str = "recompute") -> int:
        """The smallest budget that the planner accepts for a schedule."""
        return least_workspace(lambda workspace: self.planned(workspace, schedule))

    def panel_plans(self, per_doubling: int = 1) -> list:
        """Plans of `recompute` from the leanest to a single panel, with panels that widen geometrically."""
        lean = plan = self.planned(self.leanest(), "recompute")
        plans, extra = [lean], lean.panel * ITEMSIZE[self.dtype] * self.n
        while plan.panels > 1:
            plan = self.planned(lean.workspace + int(extra), "recompute")
            plans += [plan] * (plan.panel > plans[-1].panel)
            extra *= 2 ** (1 / per_doubling)
        return plans

    def block_plans(self, per_doubling: int = 4) -> list:
        """Plans of `single_pass` from the leanest to that of the largest block, for budgets that grow geometrically."""
        budget, largest = self.leanest("single_pass"), self.planned(1 << 62, "single_pass").block
        plans = [self.planned(budget, "single_pass")]
        while plans[-1].block < largest:
            budget *= 2 ** (1 / per_doubling)
            plan = self.planned(math.ceil(budget), "single_pass")
            plans += [plan] * (plan.block > plans[-1].block)
        return plans

    def knee(self) -> int:
        """The block size below which the accumulator outweighs the block, for token blocks and panels alike."""
        return self.accumulated * self.d // ITEMSIZE[self.dtype]


def human(size: int) -> str:
    power = max(0, min(3, (size.bit_length() - 1) // 10))
    return f"{size / 1024**power:.{power == 3:d}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def report(sizes: Sizes) -> str:
    """Bytes by method and block size, as text."""
    lines = [
        f"N = {sizes.n}, V = {sizes.v}, D = {sizes.d}, {sizes.dtype}, {sizes.device}: bytes over inputs and gradients",
        f"{'materialized':<16}{human(sizes.materialized):>12}",
        f"{'fused softmax':<16}{human(sizes.logits):>12}",
        f"\n{'block size':<16}{'token blocks':>12}{'panels':>12}",
    ]
    for plan in sizes.panel_plans():
        tokens = human(sizes.token_blocks(plan.panel)) if plan.panel <= sizes.n else ""
        lines.append(f"{plan.panel:<16}{tokens:>12}{human(plan.workspace):>12}")
    lines.append("")
    if knee := sizes.knee():
        lines.append(f"Below blocks of {knee} the fp32 accumulator is the larger part: smaller ones save little.")
    leaner, fewer = ("Panels", "N < V") if sizes.n < sizes.v else ("Token blocks", "V <= N")
    lines.append(f"{leaner} are the leaner of the two at the same block size, because {fewer}.")
    if sizes.dtype != "float16":
        lines.append(f"\n{'blocks':<16}{'of tokens':>12}{'single_pass':>12}")
        for plan in sizes.block_plans():
            lines.append(f"{plan.blocks:<16}{plan.block:>12}{human(plan.workspace):>12}")
        lines += ["\nThe planner's choice by default for a mean or a sum:", str(sizes.planned())]
    return "\n".join([*lines, "\nThe planner's choice by default, else:", str(sizes.planned(scalar=False))])


def choice(plan) -> str:
    """A plan in a table's cell."""
    if plan.schedule == "single_pass":
        return f"{human(plan.workspace)} (single_pass, {plan.blocks} {'blocks' if plan.blocks > 1 else 'block'})"
    return f"{human(plan.workspace)} (recompute, {plan.panels} {'panels' if plan.panels > 1 else 'panel'})"


def table(plan: Callable) -> str:
    """The models of docs/memory.md, as Markdown."""
    lines = [
        "| model | V | D | materialized, fp32 softmax | materialized, bf16 | fused softmax "
        "| default: mean or sum | default: else | leanest single_pass | leanest recompute |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (v, d) in MODELS.items():
        sizes = Sizes(DOCS_TOKENS, v, d, "bfloat16", plan)
        columns = [human(x) for x in (2 * sizes.materialized, sizes.materialized, sizes.logits)]
        columns += [choice(sizes.planned()), choice(sizes.planned(scalar=False))]
        columns += [human(sizes.leanest(schedule)) for schedule in ("single_pass", "recompute")]
        lines.append(f"| {name} | {v} | {d} | {' | '.join(columns)} |")
    return "\n".join(lines)


def with_table(text: str, plan: Callable) -> str:
    """`text` with the part between the two markers written anew."""
    head, found, rest = text.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{table(plan)}\n{END}{tail}"


def draw(sizes: Sizes, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    plans = sizes.panel_plans(per_doubling=8)
    first = plans[0].panel
    blue, green = "#0b6e8f", "#7a8b3c"
    blocks = [first * 2 ** (i / 8) for i in range(400) if first * 2 ** (i / 8) < sizes.n] + [sizes.n]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.axhline(sizes.materialized, color="#8c2d19", label="materialized (three times the logits)")
    axes.axhline(sizes.logits, color="#d1682f", label="fused softmax only (the logits)")
    axes.plot(
        blocks, [sizes.token_blocks(int(b)) for b in blocks], color=green, ls="--", label="blocks of tokens, dC in fp32"
    )
    marked = [("recompute", sizes.planned(scalar=False), lambda p: p.panel, blue, plans)]
    if sizes.dtype != "float16":
        marked.append(("single_pass", sizes.planned(), lambda p: p.block, green, sizes.block_plans(per_doubling=8)))
    for name, chosen, size_of, color, curve in marked:
        style = {"color": color, "lw": 2.5, "marker": "." if len(curve) < 20 else ""}
        axes.plot([size_of(p) for p in curve], [p.workspace for p in curve], **style, label=f"{name} (planner)")
        if chosen.schedule == name:
            axes.plot(size_of(chosen), chosen.workspace, "o", color=color, label=f"{name} by default")
    if knee := sizes.knee():
        axes.axvline(knee, color="0.5", lw=1, ls=":", label=f"{knee}: smaller blocks save little, accumulators remain")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: human(int(x))))
    axes.set(xlabel="block size (tokens, or vocabulary columns)", ylabel="bytes over inputs and gradients")
    axes.set_title(f"N = {sizes.n}, V = {sizes.v}, D = {sizes.d}, {sizes.dtype}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def load_plan() -> Callable:
    """The planner of the kernel as it is in the checkout."""
    from kernels import get_local_kernel

    from tools.build import build

    build()
    return get_local_kernel(ROOT).plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", type=int, nargs="?", default=DOCS_TOKENS, help="tokens (default: %(default)s)")
    parser.add_argument("v", type=int, nargs="?", default=128256, help="vocabulary (default: %(default)s)")
    parser.add_argument("d", type=int, nargs="?", default=4096, help="hidden size (default: %(default)s)")
    parser.add_argument("dtype", choices=ITEMSIZE, nargs="?", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="whose plan (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="draw the curves to this file")
    parser.add_argument("--docs", action="store_true", help=f"write the table and figure of {DOCS.relative_to(ROOT)}")
    args = parser.parse_args()
    if min(args.n, args.v, args.d) < 1:
        parser.error(f"sizes: got N = {args.n}, V = {args.v}, D = {args.d}, accepted are positive integers")
    plan = load_plan()
    if args.docs:
        DOCS.write_text(with_table(DOCS.read_text(), plan))
    sizes = Sizes(args.n, args.v, args.d, args.dtype, plan, args.device)
    print(report(sizes))
    figure = args.figure or (FIGURE if args.docs else None)
    if figure:
        draw(sizes, figure)
        print(f"figure: {figure}")


if __name__ == "__main__":
    main()
