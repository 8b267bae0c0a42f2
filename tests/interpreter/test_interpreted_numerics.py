"""The Triton kernels in the interpreter: options and hard numerical cases."""

from common.numerics import *  # noqa: F403
