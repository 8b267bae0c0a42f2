"""Torch's own published samples for F.linear_cross_entropy and F.cross_entropy, driven against this function.

A sample of F.cross_entropy is one of ours with the logits as hidden states and the identity as classifier.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import Case, check, truth

PROBABILITIES = "targets are class probabilities"
OWN_CLASSIFIERS = "each output position has a classifier of its own ([V, K, D] weights)"


def samples(name, dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.name == name:
            yield from op.sample_inputs("cpu", dtype, requires_grad=False)


def reason_against(sample, linear):
    """Why a sample has no counterpart here; None if it has one."""
    target = sample.args[1] if linear else sample.args[0]
    if target.is_floating_point():
        return PROBABILITIES
    if linear and sample.args[0].ndim != 2:
        return OWN_CLASSIFIERS
    return None


def as_case(sample, linear):
    options = {k: v for k, v in sample.kwargs.items() if k not in ("linear_bias", "options") and v is not None}
    if linear:
        c, targets = sample.args
        return Case(sample.input, c, targets, sample.kwargs.get("linear_bias"), options)
    logits = sample.input.movedim(1, -1)
    return Case(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), sample.args[0], None, options)


def torch_loss(sample, linear):
    """Torch's own function on the sample in float64."""
    kwargs = {k: v.double() if torch.is_tensor(v) else v for k, v in sample.kwargs.items() if k != "options"}
    if not linear:
        return F.cross_entropy(sample.input.double(), sample.args[0], **kwargs)
    c, targets = sample.args
    return F.linear_cross_entropy(sample.input.double(), c.double(), targets, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_samples_of_torch(cce, dtype):
    names = {"nn.functional.cross_entropy": False}
    if hasattr(F, "linear_cross_entropy"):
        names["nn.functional.linear_cross_entropy"] = True
    driven, left_out = 0, Counter()
    torch.manual_seed(0)
    for name, linear in names.items():
        for sample in samples(name, dtype):
            reason = reason_against(sample, linear)
            if reason is not None:
                left_out[reason] += 1
                continue
            case = as_case(sample, linear)
            torch.testing.assert_close(truth(cce, case)["loss"], torch_loss(sample, linear), rtol=1e-10, atol=1e-12)
            check(cce, case)
            driven += 1
    print(f"\n{dtype}: {driven} samples driven; left out: {dict(left_out)}")
    assert driven >= (30 if True in names.values() else 8)
    assert set(left_out) <= {PROBABILITIES, OWN_CLASSIFIERS}
