"""The Triton kernels in the interpreter: identities."""

from common.invariants import *  # noqa: F403
