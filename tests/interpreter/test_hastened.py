"""The interpreter, hastened, checks blocks as it does by itself, and integers more strictly."""

import pytest
import torch
import triton
import triton.language as tl
from common.hastened import KNOWN


@triton.jit
def add(out, x, y):
    tl.store(out + tl.arange(0, 2), x + y)


@triton.jit
def subtract(out, x, y):
    tl.store(out + tl.arange(0, 2), x - y)


@triton.jit
def multiply(out, x, y):
    tl.store(out + tl.arange(0, 2), tl.arange(0, 2) * x * y)


@triton.jit
def three_wide(out, x, y):
    tl.store(out + tl.arange(0, 2), tl.full([3], x + y, tl.int32))


EDGES = [
    (add, (2**31 - 2, 1), (2**31 - 1, 1)),
    (subtract, (-(2**31) + 1, 1), (-(2**31), 1)),
    (multiply, (2**15, 2**15), (2**16, 2**15)),
]


@pytest.mark.skipif(not triton.__version__.startswith(KNOWN), reason="another Triton is left as it is")
@pytest.mark.parametrize(("kernel", "within", "beyond"), EDGES, ids=["add", "subtract", "multiply"])
def test_integers_that_overflow(kernel, within, beyond):
    out = torch.zeros(2, dtype=torch.int32)
    kernel[(1,)](out, *within)
    x, y = within
    assert out[1] == {add: x + y, subtract: x - y, multiply: x * y}[kernel]
    with pytest.raises(Exception, match="overflow"):
        kernel[(1,)](out, *beyond)


def test_blocks_of_no_power_of_two():
    with pytest.raises(Exception, match="power of 2"):
        three_wide[(1,)](torch.zeros(2, dtype=torch.int32), 1, 2)
