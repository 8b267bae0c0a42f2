"""The torch backend on CPU: schedule `single_pass`."""

from common.extremes import *  # noqa: F403
from common.single_pass import *  # noqa: F403
from common.single_pass_options import *  # noqa: F403
