"""The torch backend on CPU: how training code uses a loss."""

from common.autograd import *  # noqa: F403
