"""Schedule `single_pass` with every option that it serves: weights, penalty, trained bias, label smoothing."""

import math

import pytest
import torch
from common.draws import least_workspace
from common.poison import poisoned_memory  # noqa: F401
from common.sweep import (  # noqa: F401
    BOTH,
    DTYPES,
    EVERY,
    MANY,
    NARROW,
    SOME,
    D,
    N,
    V,
    interpreted,
    single,
    some,
    uncounted,
    with_blocks,
)
from helpers import DEVICE, check, ignored_rows

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": -0.37},
    "temperature": {"temperature": 0.7},
    "vocab_size": {"vocab_size": V - 9},
    "weight": {"weight": True},
    "token_weight": {"token_weight": True},
    "num_items": {"num_items": 17},
    "num_items as a tensor": {"num_items": torch.tensor(2.5)},
    "z_loss": {"z_loss": 1e-2},
    "shift": {"shift": True},
    "ignore_index": {"ignore_index": 3},
}


def combined(names, reduction):
    """num_items belongs to the mean alone."""
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    if reduction != "mean":
        options.pop("num_items", None)
    return options | {"reduction": reduction}


@pytest.mark.parametrize(("name", "reduction", "dtype"), some(OPTIONS, ("mean", "sum"), DTYPES))
def test_each_option(cce, name, reduction, dtype):
    got = check(cce, single((2, N), V, D, dtype, **combined([name], reduction)), needs=BOTH)
    if name == "vocab_size":
        assert (got["dc"][V - 9 :] == 0).all()


@pytest.mark.parametrize(("reduction", "dtype"), some(("mean", "sum"), DTYPES))
def test_all_options_in_many_blocks(cce, reduction, dtype):
    case = single((2, MANY // 2), V, D, dtype, **combined(OPTIONS, reduction))
    got = check(cce, case.but(workspace=least_workspace(cce, case, BOTH)), needs=BOTH)
    assert (got["dc"][V - 9 :] == 0).all() and (got["de"][:, -1] == 0).all()


PENALIZED = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "weights": {"weight": True, "token_weight": True},
    "num_items": {"num_items": 17, "token_weight": True},
    "softcap": {"softcap": 5.0, "temperature": 0.7, "logit_scale": -0.37, "weight": True},
    "bias": {"bias": True, "vocab_size": V - 3, "shift": True},
}


@pytest.mark.parametrize(("z_loss", "name", "dtype"), some((1e-4, 1e-2, 1.0), PENALIZED, DTYPES))
def test_penalty(cce, z_loss, name, dtype):
    """In two blocks; a target of no weight keeps its penalty."""
    case = single((1, MANY), V, NARROW, dtype, z_loss=z_loss, **PENALIZED[name])
    if "weight" in case.options:
        case.options["weight"][case.targets[0, :5].clamp(min=0)] = 0.0
    check(cce, with_blocks(cce, case, 2), needs=BOTH)


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("lse", [-40.0, -0.5, -0.5 - 2**-20])
def test_penalty_that_cancels_the_loss(cce, lse, dtype):
    """The coefficient of p, 1 + 2 * lse, is negative, 0, nearly 0."""
    for v in (1, 3):
        case = single(N, v, D, dtype, ignored=0.0, reduction="sum", z_loss=1.0, spread=0.0)
        case.bias = torch.full((v,), lse - math.log(v), device=DEVICE)
        check(cce, case, needs=BOTH)


@pytest.mark.parametrize(("ignored", "blocks", "dtype"), some((0.0, 0.5), (1, 2, 3), DTYPES))
def test_trained_bias(cce, ignored, blocks, dtype):
    case = single(MANY, V, NARROW, dtype, bias=True, ignored=ignored, token_weight=True)
    check(cce, with_blocks(cce, case, blocks, EVERY), needs=EVERY)


TRAINED = {
    "softcap": {"softcap": 5.0, "temperature": 0.7, "logit_scale": -0.37},
    "penalty": {"z_loss": 0.1, "vocab_size": V - 9},
    "weights": {"weight": True, "token_weight": True, "num_items": 17, "shift": True},
}


@pytest.mark.parametrize(("name", "dtype"), some(TRAINED, DTYPES))
def test_trained_bias_with_options(cce, name, dtype):
    """Of 16-bit inputs in fp32, as under autocast."""
    case = single((1, N), V, D, dtype, bias=True, **TRAINED[name])
    case.bias = case.bias.float()
    got = check(cce, case, needs=EVERY)
    assert name != "penalty" or (got["dbias"][V - 9 :] == 0).all()


@pytest.mark.parametrize("frozen", BOTH)
@pytest.mark.usefixtures("uncounted")
def test_trained_bias_beside_a_frozen_side(cce, frozen):
    """Without a count of valid rows."""
    needs = tuple(name for name in EVERY if name != frozen)
    got = check(cce, single(N, V, D, bias=True, ignored=0.5), needs=needs)
    assert {name for name in got if name.startswith("d")} == {f"d{name}" for name in needs}


SMOOTHED = {
    "plain": {},
    "sum": {"reduction": "sum", "logit_scale": -0.37, "temperature": 0.7},
    "weights": {"weight": True, "token_weight": True},
    "num_items": {"num_items": 17, "token_weight": True, "z_loss": 0.1},
    "classes": {"weight": True, "vocab_size": V - 3, "shift": True},
}


@pytest.mark.parametrize(("name", "bias", "blocks", "dtype"), some(SMOOTHED, (True, False), (1, 2, 3), DTYPES))
def test_label_smoothing(cce, name, bias, blocks, dtype):
    case = single((1, MANY), V, NARROW, dtype, label_smoothing=0.4, bias=bias, **SMOOTHED[name])
    got = check(cce, with_blocks(cce, case, blocks, EVERY if bias else BOTH), needs=EVERY)
    assert (got["de"][ignored_rows(case)] == 0).all()


@pytest.mark.parametrize("needs", BOTH)
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.usefixtures("uncounted")
def test_label_smoothing_without_a_count(cce, ignore_index, needs):
    """Rows past the count take no part in any of its sums; a target far below the rest."""
    case = single(MANY, V, NARROW, ignored=0.4, label_smoothing=0.1, bias=True, ignore_index=ignore_index)
    case.bias[case.targets[case.targets != ignore_index][0]] = -100.0
    check(cce, with_blocks(cce, case, 2, (needs, "bias")), needs=(needs, "bias"))
