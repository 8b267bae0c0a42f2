"""The Triton kernels in the interpreter: hypothesis against the contract."""

from common.fuzz import *  # noqa: F403
