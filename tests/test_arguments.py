"""Arguments that are refused, with errors that name the argument, what was given and what is accepted."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import make_case

N, V, D = 7, 11, 6
FUNCTIONS = ("linear_cross_entropy", "linear_token_stats")


def refused(cce, error, match, function="linear_cross_entropy", **changes):
    case = make_case(N, V, D)
    arguments = {"e": case.e, "c": case.c, "targets": case.targets} | changes
    with pytest.raises(error, match=match):
        getattr(cce, function)(**arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")])
def test_dtypes_that_differ(cce, function, dtypes):
    a, b = (getattr(torch, name) for name in dtypes)
    e, c = torch.zeros(N, D, dtype=a), torch.zeros(V, D, dtype=b)
    refused(cce, TypeError, rf"(?s){dtypes[0]}.*{dtypes[1]}", function, e=e, c=c)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_are_not_accepted(cce, function, dtype):
    e, c = torch.zeros(N, D).to(dtype), torch.zeros(V, D).to(dtype)
    refused(cce, TypeError, rf"{dtype}.*bfloat16.*float16.*float32", function, e=e, c=c)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool])
def test_targets_of_another_type(cce, function, dtype):
    refused(cce, TypeError, rf"targets.*{dtype}.*int64.*int32", function, targets=torch.zeros(N, dtype=dtype))


def test_things_that_are_no_tensors(cce):
    refused(cce, TypeError, "targets.*list", targets=[1] * N)
    refused(cce, TypeError, "e.*ndarray", e=torch.zeros(N, D).numpy())
    refused(cce, TypeError, "c.*NoneType", c=None)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_shapes_that_do_not_fit(cce, function):
    long = torch.long
    refused(cce, ValueError, r"\(7, 6\).*\(11, 5\)", function, c=torch.zeros(V, 5))
    refused(cce, ValueError, r"\(7, 6\).*\(8,\)", function, targets=torch.zeros(8, dtype=long))
    refused(cce, ValueError, r"\(7, 6\).*\(1, 7\)", function, targets=torch.zeros(1, 7, dtype=long))
    refused(
        cce, ValueError, r"\(2, 7, 6\).*\(14,\)", function, e=torch.zeros(2, 7, D), targets=torch.zeros(14, dtype=long)
    )
    refused(cce, ValueError, r"bias.*\(10,\).*11", function, bias=torch.zeros(10))
    refused(cce, ValueError, r"bias.*\(1, 11\)", function, bias=torch.zeros(1, V))


def test_option_shapes_that_do_not_fit(cce):
    refused(cce, ValueError, r"weight.*\(10,\).*11", weight=torch.zeros(10))
    refused(cce, ValueError, r"token_weight.*\(6,\).*\(7,\)", token_weight=torch.zeros(6))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "shard", [torch.zeros(0), torch.zeros(0, D), torch.zeros(V * D)], ids=["empty", "0-row", "1-d"]
)
def test_a_shard_of_the_classifier(cce, function, shard):
    """What ZeRO-3 and FSDP leave of an ungathered weight: the error says to gather it."""
    refused(cce, ValueError, r"(?s)\bc\b.*ZeRO-3.*gather", function, c=shard)


@pytest.mark.parametrize("name", ["e", "c", "targets", "bias", "weight"])
def test_devices_that_differ(cce, name):
    shapes = {"e": (N, D), "c": (V, D), "targets": (N,), "bias": (V,), "weight": (V,)}
    t = torch.zeros(shapes[name], device="meta", dtype=torch.long if name == "targets" else torch.float32)
    refused(cce, ValueError, "meta.*cpu|cpu.*meta", **{name: t})


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"reduction.*'average'.*'mean'.*'sum'.*'none'", {"reduction": "average"}),
        (r"schedule.*'fast'.*'auto'.*'recompute'", {"schedule": "fast"}),
        (r"softcap.*-1", {"softcap": -1.0}),
        (r"softcap.*0", {"softcap": 0.0}),
        (r"temperature.*0", {"temperature": 0.0}),
        (r"temperature.*-2", {"temperature": -2.0}),
        (r"label_smoothing.*1\.5", {"label_smoothing": 1.5}),
        (r"label_smoothing.*-0\.1", {"label_smoothing": -0.1}),
        (r"vocab_size.*12.*11", {"vocab_size": V + 1}),
        (r"vocab_size.*0.*11", {"vocab_size": 0}),
        (r"num_items.*mean.*sum", {"num_items": 3, "reduction": "sum"}),
        (r"num_items.*mean.*none", {"num_items": torch.tensor(3), "reduction": "none"}),
        (r"num_items.*\(2,\).*number", {"num_items": torch.ones(2)}),
        (r"num_items.*gradient.*detach", {"num_items": torch.tensor(3.0, requires_grad=True)}),
        (r"token_weight.*gradient.*detach", {"token_weight": torch.ones(N, requires_grad=True)}),
        (r"weight.*gradient.*detach", {"weight": torch.ones(V, requires_grad=True)}),
        (r"logit_scale.*tensor", {"logit_scale": torch.tensor(2.0)}),
        (r"logit_scale.*nan", {"logit_scale": float("nan")}),
        (r"workspace.*\b100\b", {"workspace": 100}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range(cce, match, options):
    refused(cce, (ValueError, TypeError), match, **options)


def test_shift_of_a_single_target(cce):
    refused(cce, ValueError, "shift", e=torch.zeros(D), targets=torch.tensor(1), shift=True)


def test_options_are_keywords(cce):
    """Arguments up to `shift` may be given in order, as with Apple's function; later ones only by name."""
    case = make_case(N, V, D)
    by_position = cce.linear_cross_entropy(case.e, case.c, case.targets, None, -100, None, "sum", False)
    assert torch.equal(by_position, cce.linear_cross_entropy(case.e, case.c, case.targets, reduction="sum"))
    with pytest.raises(TypeError, match="positional"):
        cce.linear_cross_entropy(case.e, case.c, case.targets, None, -100, None, "sum", False, 1.0)


def test_dtensor(cce, tmp_path):
    """Until sharding is supported: an error that says what to do."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(V, D), init_device_mesh("cpu", (1,)), [Shard(0)])
        for function in FUNCTIONS:
            refused(cce, TypeError, r"c.*DTensor.*full_tensor", function, c=sharded)
        case = make_case(N, V, D)
        weight = distribute_tensor(case.c, init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        cce.linear_cross_entropy(case.e, weight.full_tensor(), case.targets).backward()
        assert weight.grad is not None
    finally:
        distributed.destroy_process_group()


CALL = """
import sys
sys.modules[{missing!r}] = None
from pathlib import Path
import torch
from kernels import get_local_kernel
cce = get_local_kernel(Path({variant!r}))
e = torch.randn(5, 8, requires_grad=True)
loss = cce.linear_cross_entropy(e, torch.randn(9, 8), torch.arange(5))
loss.backward()
assert e.grad.isfinite().all() and loss > 0
"""


def call_without(cce, missing, **environment):
    """A call in a fresh process in which every import of a module fails."""
    code = CALL.format(missing=missing, variant=os.path.dirname(cce.__file__))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_with_triton_too_old(cce):
    """Before 3.4 there are no tensor descriptors: the torch backend does the work."""
    result = call_without(cce, "triton.tools.tensor_descriptor")
    assert result.returncode == 0, result.stderr[-2000:]


def test_asking_for_triton_says_what_is_needed(cce):
    """The private switch asks for the kernels on a CPU; without Triton that is an error, not a silent fallback."""
    result = call_without(cce, "triton", TRITON_INTERPRET="1")
    assert result.returncode != 0
    assert "triton" in result.stderr.lower() and "3.4" in result.stderr, result.stderr[-2000:]
