"""Compute capability 9.0: kernels of specialised warps, and the plain ones that run in their place elsewhere."""

import pytest
import torch

from benchmarks.states import make

from .contract import DEVICE, DTYPES, hold, size

SINGLE = {"schedule": "single_pass"}
# Tokens and classes: the last two give the fold a narrow split, the second and the last suit tiles of 192 rows.
SHAPE, TALL, NARROW, NARROW_TALL = (700, 5003), (767, 5003), (2048, 33003), (8250, 31993)
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 30.0},
    "large-softcap": {"softcap": 60.0, "bias": True},
    "lse": {"return_lse": True},
    "ignored": {"ignored": 0.5},
    "tall": {"shape": TALL},
    "tall-softcap": {"shape": TALL, "softcap": 60.0, "ignored": 0.1},
    "narrow": {"shape": NARROW, "bias": True},
    "narrow-tall": {"shape": NARROW_TALL},
    "single_pass": SINGLE | {"bias": True},
    "single_pass-softcap": SINGLE | {"softcap": 30.0},
    "single_pass-ignored": SINGLE | {"ignored": 0.5},
    "single_pass-narrow": SINGLE | {"shape": NARROW, "workspace": 80 << 20},
    "single_pass-narrow-ignored": SINGLE | {"shape": NARROW, "ignored": 0.5, "short": True},
}
CALLS = [(name, "bf16") for name in OPTIONS] + [(name, "fp16") for name in OPTIONS if "single" not in name]


@pytest.mark.parametrize("specialised", [True, False], ids=["specialised", "plain"])
@pytest.mark.parametrize("name, dtype", CALLS)
def test_either_kind_holds_the_contract(cce, monkeypatch, name, dtype, specialised):
    options, expected, launches = dict(OPTIONS[name]), set(), {}
    n, v = options.pop("shape", SHAPE)
    short = options.pop("short", False)  # the last block of tokens
    if DEVICE == "cuda":
        configs, launches = cce.backends.triton_backend.configs, cce.backends.triton_backend.launches
        monkeypatch.setattr(configs, "SMALL", 0)  # an offset known beforehand, as in a large call
        if not specialised:
            monkeypatch.setattr(configs, "specialised", lambda *operands: False)
        elif configs.GLUON and torch.cuda.get_device_capability() == (9, 0):
            expected = {"hopper_fold_kernel", "hopper_dlogits_kernel"}
            expected |= {"hopper_accumulate_kernel"} if short else set()
            sizes = {"block_n": 256, "processors": configs.processors_of(torch.device(DEVICE))}
            narrow = [cce.splits.forward_splits(n, v, 328, block_m=rows, **sizes).narrow for rows in (128, 192)]
            assert any(narrow) == ("narrow" in name)
    before = dict(launches)
    s = make(*size((n, v, 328), (40, 331, 64)), DTYPES[dtype], DEVICE, ignored=options.pop("ignored", 0.01))
    hold(cce, s.e, s.c, s.targets, s.bias if options.pop("bias", False) else None, **options)
    launched = {kernel for kernel in launches if launches[kernel] > before.get(kernel, 0)}
    assert {kernel for kernel in launched if kernel.startswith("hopper")} == expected


@pytest.mark.cuda_only
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("v, d", [(1003, 72), (517, 328), (33003, 1024)])
@pytest.mark.parametrize("rows", [1, 100, 128, 250, 384])
def test_products_added_in_16_bits(cce, rows, v, d, dtype):
    """Beside NaN, every element is its sum rounded once, and has the same bits every time."""
    dtype, backend = DTYPES[dtype], cce.backends.triton_backend
    rng = torch.Generator(DEVICE).manual_seed(rows + v)

    def random(*shape):
        return torch.randn(shape, generator=rng, device=DEVICE).to(dtype)

    panel = torch.full((rows + 1, 64 * (v // 64 + 2)), torch.nan, dtype=dtype, device=DEVICE)[:rows]
    panel[:, :v], e, before = random(rows, v), random(rows, d), random(v, d)
    products, sums = panel[:, :v].t(), (before.clone(), before.clone())
    launched = backend.launches["hopper_accumulate_kernel"]
    for out in sums:
        backend.accumulate(products, e, out, first=False)
    hopper = backend.configs.specialised(panel, e, before)
    assert backend.launches["hopper_accumulate_kernel"] - launched == 2 * hopper
    exact = before.double() + products.double() @ e.double()
    terms = before.double().abs() + products.double().abs() @ e.double().abs()
    info = torch.finfo(dtype)
    bound = 0.5 * info.eps * (exact.abs() + info.tiny) + 2.0**-20 * terms
    assert ((sums[0].double() - exact).abs() <= bound).all()
    assert torch.equal(*sums)
