"""Options and their combinations against float64, in every dtype."""

import pytest
import torch

from benchmarks.states import make

from .contract import DEVICE, DTYPES, hold, random_upstream, size

CAPPED = {"bias": True, "softcap": 20.0, "logit_scale": 1.3}
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "bias": {"bias": True},
    "softcap": {"softcap": 30.0},
    "scale": {"logit_scale": 0.35},
    "negative-scale": {"logit_scale": -0.2, "reduction": "sum"},
    "lse": {"return_lse": True},
    "none-lse": {"reduction": "none", "return_lse": True},
    "shift": {"shift": True},
    "shift-none-lse": {"shift": True, "reduction": "none", "return_lse": True},
    "bias-softcap-scale": CAPPED,
    "everything": CAPPED | {"reduction": "none", "return_lse": True, "shift": True},
}
OTHER_DTYPES = ("plain", "none-lse", "everything")
BATCH, LENGTH = 3, size(211, 37)


def hold_option(cce, name, dtype, d):
    options = dict(OPTIONS[name])
    s = make(BATCH * LENGTH, size(5003, 331), d, dtype, DEVICE, ignored=0.1)
    e, targets = s.e.reshape(BATCH, LENGTH, d), s.targets.reshape(BATCH, LENGTH)
    shape = (BATCH, LENGTH - bool(options.get("shift")))
    upstream = random_upstream(shape) if options.get("reduction") == "none" else torch.tensor(-1.7, device=DEVICE)
    upstream_lse = random_upstream(shape, seed=2) if options.get("return_lse") else None
    bias = s.bias if options.pop("bias", False) else None
    hold(cce, e, s.c, targets, bias, upstream=upstream, upstream_lse=upstream_lse, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_bf16(cce, name):
    hold_option(cce, name, torch.bfloat16, 256)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_other_dtypes(cce, name, dtype):
    hold_option(cce, name, DTYPES[dtype], 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_rows_without_descriptors(cce, name, dtype):
    """D = 253: no row but the first is 16-byte aligned, so the pointer kernels run on every device."""
    hold_option(cce, name, DTYPES[dtype], 253)


@pytest.mark.parametrize("g", [0.0, -3.0, 65536.0, 1e-6, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_upstream_value_stays_in_its_row(cce, dtype, g):
    """All other rows have upstream 1; whatever g is, their gradients are those of a batch without its row."""
    s = make(200, 700, 64, DTYPES[dtype], DEVICE, ignored=0)
    upstream = torch.ones(200, device=DEVICE)
    upstream[77] = g
    e = s.e.detach().requires_grad_()
    loss = cce.linear_cross_entropy(e, s.c, s.targets, reduction="none")
    (de,) = torch.autograd.grad(loss, e, upstream)
    others = torch.arange(200, device=DEVICE) != 77
    assert de[others].isfinite().all()
    if g == 0:
        assert not de[77].any()
    if g != g:
        assert de[77].isnan().all()
    if dtype == "bf16" or abs(g) <= 3:
        (alone,) = torch.autograd.grad(cce.linear_cross_entropy(e, s.c, s.targets, reduction="sum"), e)
        assert torch.allclose(de[others].float(), alone[others].float(), rtol=2e-2, atol=1e-4)
