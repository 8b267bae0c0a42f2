"""The Triton kernels in the interpreter: how training code uses a loss."""

from common.autograd import *  # noqa: F403
