"""The Triton kernels in the interpreter: schedule `single_pass`, but for what never comes to a kernel."""

from common.extremes import *  # noqa: F403
from common.single_pass import *  # noqa: F403
from common.single_pass_options import *  # noqa: F403

del test_activation_checkpointing, test_grad_scaler  # noqa: F821
del test_no_tokens, test_without_gradients_it_is_the_fold  # noqa: F821
del test_what_it_cannot_serve_is_refused_by_name, test_several_refusals_are_named_together  # noqa: F821
