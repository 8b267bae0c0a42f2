"""The torch backend on CPU: hypothesis against the contract."""

from common.fuzz import *  # noqa: F403
