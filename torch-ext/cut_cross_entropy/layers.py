"""Stateless layers for `kernels.kernelize`: no __init__, no parameters of their own."""

from torch import nn

from .functional import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """The mean cross-entropy of ``hidden @ weight.T`` against `targets`, as a module.

    forward(e [..., D], c [V, D], targets [...], bias [V] or None, **options) takes what `linear_cross_entropy` takes.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, e, c, targets, bias=None, **options):
        return linear_cross_entropy(e, c, targets, bias, **options)
