"""The Triton kernels in the interpreter: panels kept since the forward."""

from common.kept import *  # noqa: F403
