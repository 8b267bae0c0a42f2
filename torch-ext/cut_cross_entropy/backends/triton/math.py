"""Elementwise functions in fp32, accurate to a few units in the last place and safe at every input."""

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0: the series where the difference would cancel."""
    series = 1.0 + x * (1 / 7)
    series = 1.0 + x * (1 / 6) * series
    series = 1.0 + x * (1 / 5) * series
    series = 1.0 + x * (1 / 4) * series
    series = 1.0 + x * (1 / 3) * series
    series = 1.0 + x * (1 / 2) * series
    return tl.where(x > -0.35, x * series, exp(x) - 1.0)


@triton.jit
def quotient(x, y):
    """x / y to 2 ulp by one reciprocal and one product, 0 where y is beyond 2^126."""
    if INTERPRETED:  # knows no library of the device
        q = x / y
    else:
        q = libdevice.fast_dividef(x, y)
    return q


@triton.jit
def tanh(x):
    """(1 - u) / (1 + u) with u = exp(-2 |x|), which cannot overflow, and the series near 0, where it would cancel."""
    a, x2 = tl.abs(x), x * x
    u = exp(-2.0 * a)
    series = x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(a < 0.3, series, tl.where(x < 0, -1.0, 1.0) * (1.0 - u) / (1.0 + u))


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0: what rounding took from 1 + x is given back to first order."""
    y = 1.0 + x
    return tl.log(y) - ((y - 1.0) - x) / y
