"""Train one small language model with each loss, and hold the differences to those of another order of summation.

    python benchmarks/convergence.py [--tiny --device cpu]      train, record and judge: status 0 if it holds
    python benchmarks/convergence.py --figure                   draw docs/figures/convergence.png from the record

The model and its text are those of byte_pairs.py, under bf16 autocast over fp32 weights; all runs share the initial
weights, the batches and the optimizer. Training amplifies the last bit. The materialized loss is therefore run several
times, with nothing but the order of its sums changed, and the largest difference between two of these runs is the
*spread*. A schedule is within if no figure of MEASURES sets it further from the materialized run than FACTOR spreads,
or than rounding explains. A control, whose logits are CONTROL times too large, must not be within.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import byte_pairs, kernel, timing  # noqa: E402
from benchmarks.byte_pairs import Settings  # noqa: E402
from benchmarks.evidence import environment  # noqa: E402
from tools.source_hash import torch_ext_sha256  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "convergence.json"
FIGURE = ROOT / "docs" / "figures" / "convergence.png"
SMOOTH = 10  # steps in the running mean of a loss curve
FACTOR = 2.0
CONTROL = 1.02
MATERIALIZED, CONTROLLED = "materialized", "control"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states [N, D], the head's weight [V, D] and targets [N]


# The runs.


def control(e, c, targets):
    return F.cross_entropy(F.linear(e, c).float() * CONTROL, targets)


def permuted(seed: int) -> Callable[[Tensor], list[Tensor]]:
    """The sequences of every batch in an order drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return lambda batch: [batch[torch.randperm(len(batch), generator=generator)]]


def split(parts: int) -> Callable[[Tensor], list[Tensor]]:
    """Micro-batches, whose gradients are added up."""
    return lambda batch: list(batch.chunk(parts))


@dataclass(frozen=True)
class Run:
    loss: Loss
    arrange: Callable[[Tensor], list[Tensor]] = split(1)


def materialized_runs(orders: int = 4, parts: tuple[int, ...] = (2, 4)) -> dict[str, Run]:
    """As it comes, with the sequences of each batch in other orders, and in micro-batches."""
    arrangements = {f"order {seed}": permuted(seed) for seed in range(1, orders + 1)}
    arrangements |= {f"{n} micro-batches": split(n) for n in parts}
    runs = {f"{MATERIALIZED}, {name}": Run(timing.materialized, arrange) for name, arrange in arrangements.items()}
    return {MATERIALIZED: Run(timing.materialized)} | runs


def all_runs(cce) -> dict[str, Run]:
    schedules = [name for name in cce.planner.SCHEDULES if name != "auto"]
    ours = {name: Run(partial(cce.linear_cross_entropy, schedule=name)) for name in schedules}
    return materialized_runs() | {CONTROLLED: Run(control)} | ours


def train(settings: Settings, run: Run, device: str, progress: Callable[[float], object] = lambda loss: None) -> dict:
    """Of every step: loss, norm of the head's gradient, norm of all others together, and milliseconds."""
    torch.manual_seed(0)
    model = byte_pairs.Model(settings).to(device)
    others = [parameter for parameter in model.parameters() if parameter is not model.head.weight]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup))
    record = {"loss": [], "norm_head": [], "norm_others": [], "milliseconds": []}
    for batch in byte_pairs.batches(settings).to(device):
        start, mean, parts = time.perf_counter(), 0.0, run.arrange(batch)
        for part in parts:
            with torch.autocast(device, torch.bfloat16):
                hidden = model(part[:, :-1]).flatten(0, 1)
                loss = run.loss(hidden, model.head.weight, part[:, 1:].flatten()) / len(parts)
            loss.backward()
            mean += loss.item()
        norms = [nn.utils.get_total_norm([p.grad for p in group]).item() for group in ([model.head.weight], others)]
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        values = (mean, *norms, round(1e3 * (time.perf_counter() - start), 3))
        for series, value in zip(record.values(), values, strict=True):
            series.append(value)
        progress(mean)
    return record


def train_all(settings: Settings, runs: dict[str, Run], device: str) -> dict[str, dict]:
    """What `train` recorded of every run, or why a schedule failed."""
    records = {}
    with tqdm(total=settings.steps * len(runs), unit="step", mininterval=1.0) as bar:

        def progress(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()

        for name, run in runs.items():
            bar.set_description(name)
            try:
                records[name] = train(settings, run, device, progress)
            except Exception as error:  # a schedule that fails is a result; without the other runs there is none
                if name.startswith((MATERIALIZED, CONTROLLED)):
                    raise
                records[name] = {"failed": f"{type(error).__name__}: {error}"}
    return records


# The verdict.


def series(record: dict, name: str) -> Tensor:
    return torch.tensor(record[name], dtype=torch.float64)


def smoothed(record: dict) -> Tensor:
    return series(record, "loss").unfold(0, SMOOTH, 1).mean(-1)


def last_quarter(record: dict) -> Tensor:
    curve = smoothed(record)
    return curve[len(curve) * 3 // 4 :]


# What is compared of two runs. The first step starts from equal weights: what differs there is the loss alone.
MEASURES: dict[str, Callable[[dict], Tensor]] = {
    "loss, all steps": smoothed,
    "loss, last quarter": last_quarter,
    "loss, first step": lambda record: series(record, "loss")[:1],
    "log norm of dC, first step": lambda record: series(record, "norm_head")[:1].log(),
    "log norm of the others, first step": lambda record: series(record, "norm_others")[:1].log(),
}


def distances(a: dict, b: dict) -> Tensor:
    """[measures]: the largest difference anywhere."""
    return torch.stack([(measure(a) - measure(b)).abs().max() for measure in MEASURES.values()])


def rounding(settings: Settings) -> Tensor:
    """[measures]: what bf16, of unit roundoff u, leaves open. The loss averages logits that were rounded, each off by
    about u: three standard errors of the mean. In a gradient, entries at targets may all round alike, by up to u."""
    u = 2**-8
    return torch.tensor([u if "norm" in name else 3 * u / settings.tokens**0.5 for name in MEASURES])


def judge(settings: Settings, records: dict[str, dict]) -> dict[str, dict]:
    """Of control and schedules: whether each is within, and its distance and limit by measure."""
    reordered = [record for name, record in records.items() if name.startswith(MATERIALIZED)]
    spread = torch.stack([distances(a, b) for a, b in itertools.combinations(reordered, 2)]).amax(0)
    limits = (FACTOR * spread).clamp(min=rounding(settings).to(spread))  # a NaN stays one, and nothing is within it

    verdicts = {}
    for name, record in records.items():
        if "failed" in record:
            verdicts[name] = {"within": False, "failed": record["failed"]}
        elif not name.startswith(MATERIALIZED):
            found = distances(record, records[MATERIALIZED])
            verdicts[name] = {"within": bool((found <= limits).all()), "measures": {}}
            for measure, distance, limit in zip(MEASURES, found.tolist(), limits.tolist(), strict=True):
                verdicts[name]["measures"][measure] = {"distance": distance, "limit": limit}
    return verdicts


def holds(verdicts: dict[str, dict]) -> bool:
    """Every schedule is within, and the control is not."""
    return all(verdict["within"] == (name != CONTROLLED) for name, verdict in verdicts.items())


def report(result: dict) -> str:
    lines = [f"{'':<36}{'first':>10}{'last':>10}{'ms a step':>11}"]
    for name, record in result["runs"].items():
        if "failed" not in record:
            milliseconds = statistics.median(record["milliseconds"])
            lines.append(f"{name:<36}{record['loss'][0]:10.5f}{record['loss'][-1]:10.5f}{milliseconds:11.2f}")
    for name, verdict in result["verdicts"].items():
        lines.append(f"\n{name}: {'within' if verdict['within'] else verdict.get('failed', 'not within')}")
        for measure, found in verdict.get("measures", {}).items():
            lines.append(f"    {measure:<36}{found['distance']:10.1e}{found['limit']:10.1e}")
    return "\n".join(lines)


# The figure.


def draw(result: dict, path: Path) -> None:
    """The loss curves, and how far each is from the materialized one; the limits are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = {name: record for name, record in result["runs"].items() if "failed" not in record}
    reference = records[MATERIALIZED]
    steps = range(1, len(reference["loss"]) + 1)
    figure, (curves, differences) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    curves.plot(steps, reference["loss"], color="0.75", lw=5, label=MATERIALIZED)
    colors, label = iter(["#1f6fb4", "#d1882f", "#4b9c6a", "#8064a2"]), f"{MATERIALIZED}, other orders of summation"
    for name, record in records.items():
        if name.startswith(MATERIALIZED):
            style, label = {"color": "0.65", "lw": 1, "label": label}, None
        elif name == CONTROLLED:
            style = {"color": "#c44e52", "ls": ":", "label": f"control, logits times {CONTROL}"}
        else:
            style = {"color": next(colors), "lw": 1.3, "label": name}
            curves.plot(steps, record["loss"], color=style["color"], lw=1.3)
        differences.plot(steps[SMOOTH - 1 :], smoothed(record) - smoothed(reference), **style)
    limit = result["verdicts"][CONTROLLED]["measures"]["loss, all steps"]["limit"]
    for sign, label in ((-1, None), (1, "limits")):
        differences.axhline(sign * limit, color="0.4", ls="--", lw=1, label=label)
    differences.set(ylim=(-1.5 * limit, 1.5 * limit), title=f"difference from materialized, mean of {SMOOTH} steps")
    curves.set(title="loss, nats per token")
    for axes in (curves, differences):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    settings, device = Settings(**result["settings"]), result["environment"]["device"] or "CPU"
    sizes = f"V = {settings.vocabulary:,}, D = {settings.dim:,}, {settings.tokens:,} tokens a step"
    figure.suptitle(f"{sizes}, bf16 autocast, {device}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the record to write, or to draw")
    parser.add_argument("--figure", type=Path, nargs="?", const=FIGURE, help="draw the record here, train nothing")
    parser.add_argument("--device", default="cuda", help="cpu with --tiny tries the harness itself")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.figure:
        draw(json.loads(args.results.read_text()), args.figure)
        return 0

    settings, cce, begun = byte_pairs.TINY if args.tiny else Settings(), kernel.load(), time.perf_counter()
    records = train_all(settings, all_runs(cce), args.device)
    result = {
        "torch_ext_sha256": torch_ext_sha256(),
        "environment": environment(cce),
        "settings": asdict(settings),
        "seconds": round(time.perf_counter() - begun, 1),
        "verdicts": judge(settings, records),
        "runs": records,
    }
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(result, indent=1) + "\n")
    good = holds(result["verdicts"])
    print(report(result), f"\n{'passed' if good else 'FAILED'} in {result['seconds']:.0f} s: {args.results}", sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.pop("LOCAL_KERNELS", None)  # what is recorded is a build of these sources
    raise SystemExit(main())
