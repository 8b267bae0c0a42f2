"""The Triton kernels in the interpreter: linear_token_stats."""

from common.statistics import *  # noqa: F403
