"""Calls drawn by number, for many examples on a GPU: seed -> call, from pools that few compiled kernels cover.

What a kernel is compiled for (options, dtypes, layouts, how the hidden size divides) belongs to one of VARIANTS; seed
k is an example of variant k % len(VARIANTS). A process that takes whole variants compiles nothing that another does.
"""

import random
from dataclasses import dataclass, replace

import torch
from common.draws import UPSTREAMS, exclude_some_classes, servable, set_upstream
from common.layouts import LAYOUTS, contiguous
from helpers import IGNORE, make_case

ROWS = [
    (1, 1), (1, 33), (2, 2), (2, 129), (15, 17), (16, 16), (17, 300), (31, 128), (32, 31), (33, 127),
    (64, 255), (127, 33), (128, 128), (129, 15), (129, 257), (200, 1), (255, 64), (300, 129), (300, 300), (0, 32),
]  # fmt: skip
HIDDEN = {"odd": (2, 15, 17, 31, 33, 127, 129, 300), "aligned": (16, 32, 144, 272), "even": (64, 128, 256), "one": (1,)}
SHAPES = {
    group: [(*ROWS[(7 * i + shift) % len(ROWS)], sizes[i % len(sizes)]) for i in range(20 if len(sizes) > 1 else 6)]
    for shift, (group, sizes) in enumerate(HIDDEN.items())
}
# True stands for a drawn value, `softcap` for a multiple of the logits' size.
COMBINATIONS = [
    {},
    {"reduction": "sum", "bias": True},
    {"reduction": "none"},
    {"softcap": 2.0},
    {"bias": True, "softcap": 10.0, "logit_scale": 0.3},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.1, "reduction": "sum"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.9, "z_loss": 0.1, "bias": True},
    {"z_loss": 1e-4, "return_lse": True},
    {"z_loss": 0.1, "token_weight": True, "reduction": "none"},
    {"token_weight": True, "shift": True},
    {"token_weight": True, "num_items": 40, "weight": True},
    {"num_items": torch.tensor(12), "shift": True, "z_loss": 1e-4},
    {"temperature": 0.6, "vocab_size": True},
    {"temperature": 4.0, "logit_scale": -2.0, "softcap": 10.0, "reduction": "sum"},
    {"vocab_size": True, "bias": True, "label_smoothing": 0.1, "reduction": "none"},
    {"return_lse": True, "reduction": "none", "shift": True},
    {"return_lse": True, "bias": True, "softcap": 2.0, "reduction": "sum"},
    {
        "bias": True, "softcap": 10.0, "weight": True, "token_weight": True, "label_smoothing": 0.1, "z_loss": 0.1,
        "temperature": 0.6, "logit_scale": -2.0, "vocab_size": True, "shift": True, "return_lse": True,
        "reduction": "none",
    },
    {"function": "linear_token_stats"},
    {"function": "linear_token_stats", "bias": True, "shift": True},
    {"function": "linear_token_stats", "softcap": 10.0, "temperature": 4.0},
    {"function": "linear_token_stats", "logit_scale": -2.0, "vocab_size": True, "bias": True, "softcap": 2.0},
]  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Variant:
    combination: int
    dtype: torch.dtype
    group: str
    layouts: dict
    index_dtype: torch.dtype
    schedule: str  # "auto" instead where an example is not one that single_pass serves


def variants():
    """Every combination in every dtype, with two kinds of hidden size in bf16; some with D = 1."""
    rng = random.Random(0)
    groups = ("odd", "aligned", "even")
    for k in range(len(COMBINATIONS)):
        for j, dtype in enumerate(DTYPES):
            chosen = [groups[(k + j) % 3], groups[(k + j + 1) % 3]][: 2 if dtype == torch.bfloat16 else 1]
            chosen += ["one"] * (k % 6 == j)
            for group in chosen:
                layouts = {
                    name: contiguous if rng.random() < 0.6 else rng.choice(LAYOUTS)
                    for name in ("e", "c", "bias", "targets")
                }
                integer = rng.choice((torch.int64, torch.int64, torch.int32))
                yield Variant(k, dtype, group, layouts, integer, ("single_pass", "recompute", "auto")[(k + j) % 3])


VARIANTS = tuple(variants())


@dataclass
class Example:
    function: str
    case: object
    needs: tuple  # the inputs that require gradients
    narrow: bool  # in the smallest workspace
    about: str  # what was drawn, in words


def draw(seed) -> Example:
    """The example of this number, on the CPU."""
    variant, rng = VARIANTS[seed % len(VARIANTS)], random.Random(seed)
    n, v, d = rng.choice(SHAPES[variant.group])
    shape = rng.choice([(n,), (1, n), (n, 1), (2, n // 2)]) if n else (0,)
    spread, ignored = rng.choice([0.0, 0.5, 3.0, 12.0]), rng.choice([0.0, 0.3, 0.9, 2.0])
    options = {"shift": False, "vocab_size": None} | COMBINATIONS[variant.combination]
    function = options.pop("function", "linear_cross_entropy")
    if function == "linear_cross_entropy":
        options.setdefault("reduction", "mean")
    options["ignore_index"] = rng.choice([IGNORE, IGNORE, -1, 0, v - 1, v + 5])
    if options["vocab_size"]:
        options["vocab_size"] = rng.randint(max(1, v - 40), v)
    if (options["vocab_size"] or v) == 1:
        options.pop("label_smoothing", None)  # nothing is left of a single class, and no relative accuracy of it
    if "softcap" in options:
        options["softcap"] *= (spread + 1) * abs(options.get("logit_scale", 1.0))
    about = {name: x for name, x in options.items() if x is not None and x is not False}
    bias = options.pop("bias", False)
    case = make_case(shape, v, d, variant.dtype, bias=bias, ignored=ignored, spread=spread, seed=seed, **options)
    excluded = bias and not options.get("label_smoothing") and options.get("logit_scale", 1) > 0 and rng.random() < 0.5
    if excluded:
        exclude_some_classes(case)
    size, kinds = rng.choice([1.0, 1.0, -0.01, 64.0]), []
    set_upstream(case, size, seed, lambda: kinds.append(rng.choice(UPSTREAMS)) or kinds[-1])
    case.targets = case.targets.to(variant.index_dtype)
    for name, layout in variant.layouts.items():
        t = getattr(case, name)
        if t is not None and t.numel():
            setattr(case, name, layout(t))
    inputs = ["e", "c"] + ["bias"] * bias
    needs = tuple(rng.sample(inputs, rng.randint(1, len(inputs)))) if rng.random() < 0.4 else tuple(inputs)
    narrow = rng.random() < 0.5
    if function == "linear_cross_entropy":
        possible = variant.schedule != "single_pass" or servable(case, needs)
        case.options["schedule"] = about["schedule"] = variant.schedule if possible else "auto"
    layouts = {name: layout.__name__ for name, layout in variant.layouts.items()}
    words = (
        f"{function} targets {shape} V {v} D {d} {variant.dtype} {variant.index_dtype} {about} ignored {ignored} "
        f"spread {spread} excluded {excluded} upstream {size} {kinds} layouts {layouts} needs {needs} narrow {narrow}"
    )
    return Example(function, case, needs, narrow, words)


def moved(case, device):
    """The case on another device, every stride and offset as it was."""

    def move(t):
        if not isinstance(t, torch.Tensor) or not t.numel():
            return t.to(device) if isinstance(t, torch.Tensor) else t
        whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
        return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())

    tensors = {name: move(getattr(case, name)) for name in ("e", "c", "targets", "bias")}
    options, upstream = ({k: move(x) for k, x in of.items()} for of in (case.options, case.upstream))
    return replace(case, **tensors, options=options, upstream=upstream)
