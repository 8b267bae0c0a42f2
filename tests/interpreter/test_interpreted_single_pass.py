"""The Triton kernels in the interpreter: schedule `single_pass`."""

from common.extremes import *  # noqa: F403
from common.single_pass import *  # noqa: F403
