"""The torch backend on CPU: identities."""

from common.invariants import *  # noqa: F403
