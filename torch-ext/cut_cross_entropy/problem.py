"""What is computed: the inputs of one call and how a dot product becomes a logit."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """z = softcap * tanh((e @ c.T + bias) * scale / softcap) / temperature, over the rows whose target counts."""

    e: Tensor  # [N, D]
    c: Tensor  # [V, D], real classes only
    targets: Tensor  # [N]
    bias: Optional[Tensor]  # [V]
    weight: Optional[Tensor]  # [V], class weights of the smoothed part
    ignore_index: int
    softcap: Optional[float]
    scale: float
    temperature: float
    offset: Optional[Tensor] = None  # [N], the targets' logits where they are known; the m of `Fold` takes its place

    @property
    def total_weight(self):
        """sum_v w_v"""
        return self.c.shape[0] if self.weight is None else self.weight.float().sum()


class Fold(NamedTuple):
    """Per-token results of the forward, fp32 [N] (0 at ignored rows), and the valid rows.

    `m` and `s` are kept apart because `lse = m + log s` rounds away what a large common offset hides. They are the
    backend's own: the Triton kernels count m in units of log2(e), and have it inf at ignored rows, where every p is 0.
    """

    nll: Tensor  # lse - z_y
    lse: Tensor
    smooth: Optional[Tensor]  # sum_v w_v * (lse - z_v)
    entropy: Optional[Tensor]  # -sum_v p_v * log p_v
    prediction: Optional[Tensor]  # int64, -1 at ignored rows
    m: Tensor  # what exponentials are relative to: max_v z_v or z_y
    s: Tensor  # sum_v exp(z_v - m)
    rows: Tensor  # int32 [N], the valid rows in order, then the others
    count: Tensor  # int32 [1], how many there are
    kept: Optional[Tensor] = None  # [N, columns] exponentials of the first classes, relative to m
    overflow: Optional[Tensor] = None  # int32 [1], 1 where an exponential left its range: kept is then not to be used
    counting: Optional[object] = None  # the backend's `count_later`, for a backward that is to come


class Gradients(NamedTuple):
    """Where the gradients of e, c and bias are written; None where one is not wanted."""

    de: Optional[Tensor]  # [N, D]
    dc: Optional[Tensor]  # [V, D], real classes only
    dbias: Optional[Tensor]  # [V]

    @property
    def wanted(self):
        return tuple(gradient is not None for gradient in self)

    def columns(self, v0, v1):
        """dC and dbias of the classes v0 to v1."""
        return (None if gradient is None else gradient[v0:v1] for gradient in (self.dc, self.dbias))


class Coefficients(NamedTuple):
    """loss_i = nll_i * (lse_i - z_iy) + square_i * lse_i^2 + smooth_i * sum_v w_v (lse_i - z_iv).

    fp32 [N] of any stride, and None for 1, 0 and 0. Those of smooth are 0 at ignored rows; the others meet a 0 there.
    """

    nll: Optional[Tensor]
    square: Optional[Tensor]
    smooth: Optional[Tensor]

    def rows(self, index):
        return Coefficients(*(x if x is None else x[index] for x in self))

    def loss(self, nll, lse, smooth=None):
        """loss [N]; without the last term where its sums are not given."""
        loss = nll if self.nll is None else self.nll * nll
        if self.square is not None:
            loss = loss + self.square * lse.square()
        if self.smooth is not None and smooth is not None:
            loss = loss + self.smooth * smooth
        return loss

    def gradients(self, problem, lse):
        """The derivatives by row, but for the - smooth_i * w_v."""
        rest = None if self.square is None else 2.0 * self.square * lse
        if self.smooth is not None:
            on_p = self.smooth * problem.total_weight
            rest = on_p if rest is None else rest + on_p
        return RowGradients(self.nll, rest, None, None)


class RowGradients(NamedTuple):
    """Upstream gradients by row, fp32 [N] of any stride. With q = p - onehot,

    dz_v = nll * q_v + rest * p_v - smooth * w_v - entropy * p_v * (log p_v + H)
    """

    nll: Optional[Tensor]
    rest: Optional[Tensor]
    smooth: Optional[Tensor]
    entropy: Optional[Tensor]
