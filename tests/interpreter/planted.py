"""Faults planted in copies of the sources, each with the small check that finds it: `planted.py FOLDER NAME ...`.

Prints one line of JSON a fault, flushed, so that what kills the process is known too.
"""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parents[1]), str(here.parents[2])]

import pytest
import torch
from common import sweep
from common.poison import poison_memory
from helpers import check, make_case, once_rounded, relative_error, run, truth

from tools.build import build
from tools.source_hash import ROOT


def plain(cce):
    """One block of rows, a quarter ignored, two splits of several tiles, the last tile partial."""
    check(cce, make_case(9, 141, 20, torch.float16, reduction="none", return_lse=True))


def dense(cce):
    """The same with no row ignored: relative to the targets' logits."""
    check(cce, make_case(9, 141, 20, torch.float16, reduction="none", return_lse=True, ignored=0.0))


def distant(cce):
    """A target 100 nats below the rest, of which a second look is needed."""
    case = make_case(9, 141, 20, torch.float16, reduction="none", bias=True, ignored=0.0)
    case.bias[case.targets[3]] = -100
    check(cce, case)


def narrow_split(cce):
    """Two splits and a narrow one, in the second look at a distant target too."""
    splits = importlib.import_module(f"{cce.__name__}.splits").Splits(every=3, narrow=1, listed=3)
    fold = importlib.import_module(f"{cce.__name__}.backends.triton.fold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "forward_splits", lambda *_, **__: splits)
        distant(cce)
        check(cce, make_case(9, 141, 20, torch.float16, reduction="none", return_lse=True))


def long_split(cce):
    """Two blocks of rows, one split of many tiles."""
    check(cce, make_case(20, 301, 20, torch.float16, reduction="none", return_lse=True))


def many_options(cce):
    """D of two tiles with a bias, softcap, temperature; 19 pad lanes that a softcap of 2 would not hide."""
    case = make_case(9, 45, 20, torch.float16, bias=True, softcap=2.0, temperature=0.7, reduction="none", spread=1.0)
    check(cce, case)


def confident(cce):
    """p of the target between 0.99 and 0.9999, one token: nothing else hides its own p - 1."""
    case = make_case(3, 37, 16, torch.float16, spread=0.3, reduction="sum", ignored=0.0)
    case.c[case.targets] += 1.5 * case.e
    check(cce, case)


def low_logits(cce):
    """Every logit about -500: exp(z) is 0, exp(z - max) is not."""
    case = make_case(5, 40, 16, reduction="none", bias=True, ignored=0.0)
    case.bias -= 500
    case.targets[1] = -100
    check(cce, case)


def uneven_batch(cce):
    """The valid tokens lie in the first half."""
    case = make_case(12, 37, 16, torch.float16, ignored=0.0)
    case.targets[7:] = -100
    check(cce, case)


def many_panels(cce):
    """Six panels: dE no worse than rounding once."""
    case = make_case(8, 1400, 16, torch.float16, ignored=0.0)
    floor = cce.plan(8, 1400, 16, torch.float16, device="cuda")
    least = floor.workspace - floor.parts["backward:panel"] - floor.parts["backward:fp32 dC panel"] + 256 * 80
    got = run(cce.linear_cross_entropy, case.but(workspace=least))
    want, (model, _) = truth(cce, case), once_rounded(cce, case)
    found, unavoidable = (relative_error(t["de"], want["de"]) for t in (got, model))
    assert found <= 1.2 * unavoidable, f"de: error {found:.2e}, {unavoidable:.2e} when rounded once"


def bias_gradient(cce):
    check(cce, make_case(9, 45, 16, torch.float16, bias=True))


def predictions(cce):
    """Equal classes: the lowest id."""
    case = make_case(4, 301, 16, ignored=0.0, spread=0.0)
    assert (run(cce.linear_token_stats, case)["prediction"] == 0).all()


def held(cce, case, blocks=1, all_rows=False, needs=sweep.BOTH, rounded=False):
    """The contract, by `single_pass` in so many blocks of tokens."""
    with pytest.MonkeyPatch.context() as patch:
        sweep.teach(cce, patch)
        if all_rows:
            sweep.take_all_rows(cce, patch)
        check(cce, sweep.with_blocks(cce, case, blocks, needs, rounded), needs=needs)


def swept(cce):
    held(cce, sweep.single(9, 70, 16, torch.bfloat16, softcap=5.0))


def swept_confident(cce):
    """p of the target between 0.99 and 0.9999."""
    case = sweep.single(3, 37, 16, torch.bfloat16, spread=0.3, reduction="sum", ignored=0.0)
    case.c[case.targets] += 1.5 * case.e
    held(cce, case)


def swept_in_blocks(cce):
    held(cce, sweep.single(45, 70, 8, token_weight=True), blocks=3)


def swept_in_rounded_blocks(cce):
    """dC in 16 bits, but for the four most frequent of eight targets."""
    case = sweep.single(29, 70, 16, torch.bfloat16)
    case.targets = torch.arange(29) % 8
    held(cce, case, blocks=2, rounded=True)


def swept_again(cce):
    """Four blocks: the third is as the second, but for a target 150 nats below the rest."""
    case = sweep.single(61, 70, 16, torch.bfloat16, bias=True, ignored=0.0)
    case.bias[case.targets[40]] = -150.0
    held(cce, case, blocks=4)


def swept_past_the_count(cce):
    """One class towers over the rest, and there are rows past the count."""
    case = sweep.single(9, 70, 16, torch.bfloat16, bias=True)
    case.bias[50] = 150.0
    held(cce, case, all_rows=True)


def swept_mostly_ignored(cce):
    """More row blocks than the count fills, all of them contracted, in memory that holds NaN at first."""
    case = sweep.single(200, 70, 16, torch.bfloat16, ignored=0.9)
    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        held(cce, case, all_rows=True)


def swept_penalized(cce):
    held(cce, sweep.single(9, 70, 16, torch.bfloat16, spread=0.3, z_loss=0.1))


def swept_smoothed_at_once(cce):
    held(cce, sweep.single(9, 70, 16, label_smoothing=0.3))


def swept_smoothed(cce):
    """Two blocks, rows past the count, a trained bias."""
    case = sweep.single(45, 70, 8, token_weight=True, label_smoothing=0.1, bias=True, ignored=0.1)
    case.targets[[0, -1]] = 1
    held(cce, case, blocks=2, all_rows=True, needs=sweep.EVERY)


class Fault(NamedTuple):
    files: str | tuple[str, ...]
    edits: list[tuple[str, str]]  # exact text, each found once in all the files, and what takes its place
    found_by: Callable


FOLD, ONLINE, SPLITS, MERGE, DLOGITS, GRADIENT, EXPONENTIALS, ROWS, OFFSETS, TARGETS, CONTRACT, TILE = (
    f"backends/triton/{name}.py"
    for name in "fold online splits merge dlogits gradient exponentials rows offsets targets contract logits".split()
)
RECOMPUTE, SINGLE_PASS, FUNCTIONAL = "schedules/recompute.py", "schedules/single_pass.py", "functional.py"
TRANSFORM = "        b_x, unit = transform(b_dot, bias, o_v, V, inner, outer, HAS_BIAS, SOFTCAP)\n"
SCALED = "    return scaled(b_dot, inner, outer, SOFTCAP)\n"

FAULTS = {
    "pad lanes masked before softcap": Fault(
        (TILE, ONLINE),
        [
            (SCALED, f'    b_dot = tl.where((o_v < V)[None, :], b_dot, float("-inf"))\n{SCALED}'),
            ('b_real = tl.where((o_v < V)[None, :], b_x, float("-inf"))', "b_real = b_x"),
        ],
        many_options,
    ),
    "pad lanes counted": Fault(FOLD, [("tl.where((o_v < V)[None, :], b_p, 0.0)", "b_p")], dense),
    "bias added per tile of D": Fault(
        FOLD,
        [(
            TRANSFORM + "        masked =",
            "        if HAS_BIAS:\n"
            "            b_dot += (tl.cdiv(D, BK) - 1) * tl.load(bias + o_v, mask=o_v < V, other=0.0)[None, :]\n"
            + TRANSFORM + "        masked =",
        )],
        many_options,
    ),
    "no second look at a distant target": Fault(FOLD, [("run(retry=True)", "pass")], distant),
    "max started at 0": Fault(
        FOLD,
        [('b_least = tl.full([BM], float("-inf"), dtype=tl.float32)', "b_least = b_zero")],
        low_logits,
    ),
    "sum not rescaled when the max moves": Fault(
        ONLINE, [("b_s * b_decay + b_add", "b_s + b_add")], long_split
    ),
    "splits merged without their maxima": Fault(
        MERGE, [("b_s = b_s * b_decay + b_add * b_gain", "b_s = b_s + b_add")], plain
    ),
    "columns of a narrow split folded by another too": Fault(
        SPLITS, [("shared = (spans - narrow)", "shared = spans")], narrow_split
    ),
    "target counted twice": Fault(ONLINE, [("b_p = tl.where(b_hit, 0.0, b_p)", "b_p = b_p")], plain),
    "ties to the highest id": Fault(
        ONLINE,
        [("tl.max((b_top > b_m)", "tl.max((b_top >= b_m)"), ("tl.where(b_top > b_m", "tl.where(b_top >= b_m")],
        predictions,
    ),
    "logits rounded to 16 bits": Fault(
        TILE, [("return b_z\n\n\n@triton.jit\ndef scaled", "return b_z.to(tl.float16).to(tl.float32)\n\n\n"
                "@triton.jit\ndef scaled")], plain
    ),
    "p rounded before the 1 is subtracted": Fault(
        GRADIENT, [("nll * expm1(log_p)", "nll * (p.to(tl.float16).to(tl.float32) - 1.0)")], confident
    ),
    "softcap left out of the gradient": Fault(
        GRADIENT, [("if SOFTCAP > 0:", "if SOFTCAP > 0 and HAS_SMOOTH:")], many_options
    ),
    "temperature left out of the gradient": Fault(
        DLOGITS,
        [("scalars.append(problem.scale / problem.temperature)", "scalars.append(problem.scale)")],
        many_options,
    ),
    "dE accumulated in 16 bits": Fault(
        CONTRACT,
        [(
            "accumulator.addmm_(a.float(), b.float())",
            "accumulator.copy_((accumulator + a.float() @ b.float()).half())",
        )],
        many_panels,
    ),
    "bias gradient left in the unit of the panel": Fault(
        CONTRACT, [("dbias.copy_(total if unit is None else total.div_(unit))", "dbias.copy_(total)")], bias_gradient
    ),
    "last columns of an odd vocabulary forgotten": Fault(
        RECOMPUTE, [("((v0, cut), (cut, v1)) if a < b]", "((v0, cut),)]")], plain
    ),
    "ignored rows of dE left unwritten": Fault(
        ROWS, [("_expand(de.shape[0], accumulator, de", "_expand(live, accumulator, de")], plain
    ),
    "mean of chunk means": Fault(
        FUNCTIONAL,
        [(
            "loss = loss.sum() / count.clamp(min=1)",
            "loss = sum(part.sum() / (part > 0).sum().clamp(min=1) for part in loss.chunk(2)) / 2",
        )],
        uneven_batch,
    ),
    "p rounded before the 1 is subtracted, in a sweep": Fault(
        EXPONENTIALS,
        [(
            "b_x = expm1(-b_loss)",
            "b_x = tl.exp2(-LOG2E * b_loss).to(panel.dtype.element_ty).to(tl.float32) - 1.0",
        )],
        swept_confident,
    ),
    "factors without the sum of the row": Fault(EXPONENTIALS, [("b_g * factor / b_s", "b_g * factor")], swept),
    "slope of the softcap at the target alone": Fault(
        FOLD, [("b_stored = b_p * (1.0 - b_x * b_x)", "b_stored = b_p * 1.0")], swept
    ),
    "dC of the last block alone": Fault(
        SINGLE_PASS, [("self.total[a:b], i0 == 0, row)", "self.total[a:b], True, row)")], swept_in_blocks
    ),
    "columns next to those of frequent ids": Fault(
        SINGLE_PASS, [("index_select(1, self.ids)", "index_select(1, self.ids ^ 1)")], swept_in_rounded_blocks
    ),
    "frequent ids of the last block alone": Fault(
        SINGLE_PASS, [("self.frequent, first)", "self.frequent, True)")], swept_in_rounded_blocks
    ),
    "targets taken out of the panel and not put back": Fault(
        SINGLE_PASS, [("put_back()", "pass")], swept_in_rounded_blocks
    ),
    "equal targets added once": Fault(
        TARGETS, [("while here == y:", "while (here == y) & (j == k):")], swept_in_rounded_blocks
    ),
    "every block weighs its tokens as the first": Fault(
        SINGLE_PASS, [("slice(i0, i1)", "slice(0, i1 - i0)")], swept_in_blocks
    ),
    "smoothing taken from the dC of one block twice": Fault(
        SINGLE_PASS, [("if self.row is None:", "if True:")], swept_smoothed_at_once
    ),
    "smoothing in dE by the first rows of a block": Fault(
        SINGLE_PASS, [("smoothing.of_rows(i0, i0 + n, columns)", "smoothing.of_rows(0, n, columns)")], swept_smoothed
    ),
    "ignored rows listed in one place": Fault(
        ROWS, [("tl.where(b_valid, b_upto - 1, N - 1 - (o_n - b_upto))", "tl.where(b_valid, b_upto - 1, N - 1)")],
        swept_smoothed,
    ),
    "a panel left as the block before had it": Fault(
        SINGLE_PASS, [("            again()\n", "            pass\n")], swept_again
    ),
    "rows that the host takes for valid left out": Fault(
        OFFSETS, [("0 if known else rows.numel()", "0")], swept_mostly_ignored
    ),
    "hidden states left as the block before had them": Fault(
        OFFSETS, [("        self.run(first=i0)", "        i0 == 32 or self.run(first=i0)")], swept_again
    ),
    "penalty left out at the target": Fault(
        EXPONENTIALS, [("b_rest * exp(-b_loss)", "b_rest * 0.0")], swept_penalized
    ),
    "an overflow that nobody notices": Fault(
        FOLD, [("m_m & overflows(b_m, b_s))", "m_m & overflows(b_m, b_s) & (o_m < 0))")], swept_past_the_count
    ),
    "rows past the count have probabilities": Fault(
        MERGE, [('tl.where(valid, b_m, float("inf"))', "tl.where(valid, b_m, 0.0)")], swept_past_the_count
    ),
}  # fmt: skip

CHECKS = {fault.found_by for fault in FAULTS.values()}


def plant(name, folder):
    """A built copy of the kernel with a fault (none for "no fault"), loaded. LookupError where the text is gone."""
    from kernels import get_local_kernel

    shutil.copytree(ROOT / "torch-ext", folder / "torch-ext", ignore=shutil.ignore_patterns("__pycache__", "_ops.py"))
    shutil.copyfile(ROOT / "build.toml", folder / "build.toml")
    if name in FAULTS:
        files, edits, _ = FAULTS[name]
        files = [folder / "torch-ext" / "cut_cross_entropy" / f for f in ([files] if isinstance(files, str) else files)]
        for old, new in edits:
            places = [file for file in files for _ in range(file.read_text().count(old))]
            if len(places) != 1:
                raise LookupError(f"{FAULTS[name].files}: {len(places)} places that read {old!r}, not one")
            places[0].write_text(places[0].read_text().replace(old, new))
    build(folder)
    return get_local_kernel(folder / "build", backend="cpu")


def verdict(name, folder):
    """(name, how far it got, what was found or None). The sources as they are have to pass every check."""
    try:
        cce = plant(name, folder)
    except LookupError as error:
        return name, "not planted", str(error)
    for focused in [FAULTS[name].found_by] if name in FAULTS else CHECKS:
        try:
            focused(cce)
        except Exception as error:
            return name, "found", f"{focused.__name__}: {type(error).__name__}: {error}".splitlines()[0]
    return name, "not found", None


if __name__ == "__main__":
    from common.hastened import hasten_interpreter
    from common.poison import poison_memory

    with pytest.MonkeyPatch.context() as patch:
        hasten_interpreter(patch)
        poison_memory(patch)
        for i, name in enumerate(sys.argv[2:]):
            print(json.dumps(verdict(name, Path(sys.argv[1]) / str(i))), flush=True)
