"""The torch backend on CPU: linear_token_stats."""

from common.statistics import *  # noqa: F403
