"""The Triton kernels in the interpreter: the uses of a loss in which the kernels themselves take part."""

from common.autograd import (  # noqa: F401
    poisoned_memory,
    test_autocast,
    test_autocast_of_mixed_dtypes,
    test_backward_under_autocast,
    test_deterministic_algorithms,
    test_frozen_sides,
    test_grad_scaler,
    test_retain_graph,
    test_second_derivatives_are_refused,
    test_the_count_is_asked_for_before_the_fold,
    test_two_backwards_accumulate,
)
