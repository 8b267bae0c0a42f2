"""The torch backend on CPU: options and hard numerical cases."""

from common.numerics import *  # noqa: F403
