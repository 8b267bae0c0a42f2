"""Hypothesis draws calls: shapes, dtypes, layouts, options in any combination, upstream gradients."""

import torch
from common.draws import UPSTREAMS, exclude_some_classes, servable, set_upstream
from common.layouts import LAYOUTS
from helpers import DTYPES, IGNORE, make_case, pick
from hypothesis import strategies as st

EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129)


def sizes(least, most):
    """Half of them at the edges of tiles."""
    return st.one_of(st.sampled_from([n for n in EDGES if least <= n <= most]), st.integers(least, most))


def maybe(strategy):
    """Mostly absent, so that options meet in small groups as well as all together."""
    return st.one_of(st.none(), st.none(), strategy)


def shapes(pool=None):
    """(N, V, D), from a pool where every new size would cost a compilation."""
    n, v, d = pick((300, 300, 300), (40, 80, 40))
    return st.sampled_from(pool) if pool else st.tuples(sizes(0, n), sizes(1, v), sizes(1, d))


@st.composite
def cases(draw, pool=None, dtypes=DTYPES):
    """(function name, Case, which inputs need gradients, whether the smallest workspace is to be used)."""
    n, v, d = draw(shapes(pool))
    function = draw(st.sampled_from(["linear_cross_entropy"] * 4 + ["linear_token_stats"]))
    shift = draw(st.sampled_from([False, False, True]))
    shape = draw(st.sampled_from([(n,), (1, n), (n, 1), (2, n // 2)])) if n else (0,)
    vocab_size = draw(maybe(st.integers(max(1, v - 40), v)))
    classes = vocab_size or v  # of a single class nothing is left after smoothing, and no relative accuracy of it
    spread, scale = draw(st.sampled_from([0.0, 0.5, 3.0, 12.0])), draw(st.sampled_from([1.0, 1.0, 0.3, -2.0]))
    options = {
        "ignore_index": draw(st.sampled_from([IGNORE, IGNORE, -1, 0, v - 1, v + 5])),
        "softcap": draw(maybe(st.sampled_from([2.0, 10.0]).map(lambda x: x * (spread + 1) * abs(scale)))),
        "logit_scale": scale,
        "temperature": draw(st.sampled_from([1.0, 1.0, 0.6, 4.0])),
        "vocab_size": vocab_size,
        "shift": shift,
    }
    if function == "linear_cross_entropy":
        reduction = draw(st.sampled_from(["mean", "sum", "none"]))
        options |= {
            "reduction": reduction,
            "return_lse": draw(st.booleans()),
            "weight": draw(maybe(st.just(True))),
            "token_weight": draw(maybe(st.just(True))),
            "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 0.9])) if classes > 1 else 0.0,
            "z_loss": draw(st.sampled_from([0.0, 0.0, 1e-4, 0.1])),
            "num_items": draw(maybe(st.sampled_from([1, 40, 2.5, torch.tensor(12)]))) if reduction == "mean" else None,
        }
    case = make_case(
        shape,
        v,
        d,
        draw(st.sampled_from(dtypes)),
        bias=draw(st.booleans()),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9, 2.0])),
        spread=spread,
        seed=draw(st.integers(0, 2**31)),
        **options,
    )
    if case.bias is not None and not options.get("label_smoothing") and scale > 0 and draw(st.booleans()):
        exclude_some_classes(case)
    size, upstream_seed = draw(st.sampled_from([1.0, 1.0, -0.01, 64.0])), draw(st.integers(0, 2**31))
    set_upstream(case, size, upstream_seed, lambda: draw(st.sampled_from(UPSTREAMS)))
    case.targets = case.targets.to(draw(st.sampled_from([torch.int64, torch.int32])))
    for name in ("e", "c", "bias", "targets"):
        t = getattr(case, name)
        if t is not None and t.numel():
            setattr(case, name, draw(st.sampled_from(LAYOUTS))(t))
    inputs = ["e", "c"] + ["bias"] * (case.bias is not None)
    needs = draw(st.lists(st.sampled_from(inputs), unique=True).map(tuple)) or tuple(inputs)
    if function == "linear_cross_entropy":
        schedule = draw(st.sampled_from(["auto", "recompute", "single_pass"]))
        case.options["schedule"] = schedule if schedule != "single_pass" or servable(case, needs) else "auto"
    return function, case, needs, draw(st.booleans())
