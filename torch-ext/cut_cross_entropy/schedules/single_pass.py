"""Schedule `single_pass`: loss and gradients of a scalar loss in one sweep over blocks of tokens.

6 N V D floating-point operations: the logits are formed once. Scratch: the panel of one block, [block, V], and fp32
sums for dC where several blocks add to it.
"""

import functools

import torch

from ..problem import Coefficients
from . import recompute
from .smoothing import Smoothing


def planned(backend, e, v, needs, workspace, schedule):
    """The plan of a scalar loss with gradients; where e is empty, that of `recompute`."""
    schedule = schedule if e.numel() else "recompute"
    return recompute.planned(backend, e, v, needs, workspace, schedule=schedule, scalar=True)


def loss_and_gradients(backend, problem, weights, square, smooth, mean, gradients, workspace, schedule):
    """The sum over the valid rows of the loss of these coefficients, and its gradients.

    Where there are no weights they are 1, or with `mean` 1 over the number of valid rows. Where `schedule` is "auto"
    and `recompute` the better plan, that is what runs.
    """
    n, v = problem.e.shape[0], problem.c.shape[0]
    plan = planned(backend, problem.e, v, gradients.wanted, workspace, schedule)
    rows, count = backend.select(problem.targets, problem.ignore_index, v)
    if weights is None:
        one = count.float().clamp_(min=1.0).reciprocal_() if mean else problem.e.new_ones(1, dtype=torch.float32)
        weights = one.expand(n)
    coefficients = Coefficients(weights, square, smooth)
    if plan.schedule == "recompute":
        counting = backend.count_later(problem, count)
        fold = backend.fold(problem, rows, count, smooth is not None, False, False)._replace(counting=counting)
        upstream = coefficients.gradients(problem, fold.lse)._replace(smooth=smooth)
        recompute.backward(backend, problem, fold, upstream, gradients, workspace)
        return coefficients.loss(fold.nll, fold.lse, fold.smooth).sum()

    # In the order of the rows listed.
    coefficients = Coefficients(*(x if x is None or x.stride(0) == 0 else x[rows.long()] for x in coefficients))
    return _sweep(backend, problem, coefficients, rows, count, gradients, plan)


def _sweep(backend, problem, coefficients, rows, count, gradients, plan):
    """Block by block of the rows listed: its panel, and what it adds to the loss and to each gradient."""
    n, (de, dc, dbias) = problem.e.shape[0], gradients
    smoothing = None if coefficients.smooth is None else Smoothing(backend, problem, coefficients.smooth)
    # Before there is a panel: sorting the counts of all classes takes a part of its bytes.
    sums = [] if dc is None else [_sum_dc(backend, problem, dc, plan, rows, smoothing)]
    panel = backend.new_panel(problem.e, plan.block, plan.panel)
    narrow, wide = backend.new_rows(problem.e, plan.block, plan.chunk)
    # dE after dC: its fp32 rows take the place of the scaled rows of e.
    sums += [] if dbias is None else [_SumDBias(backend, dbias, smoothing)]
    sums += [] if de is None else [_SumDE(backend, problem, de, wide, rows, count, smoothing)]
    nll = torch.zeros(n, dtype=torch.float32, device=problem.e.device)
    lse = torch.zeros_like(nll) if smoothing or coefficients.square is not None else None
    # The count is on its way to the host while the first block is folded.
    counting = backend.count_later(problem, count)
    blocks = backend.Blocks(problem, rows, count, plan.block, narrow, counting.known)
    live, i0, again = counting.now, 0, None
    while i0 == 0 or i0 < live:
        i1 = min(i0 + plan.block, n if live is None else live)
        block, here = blocks.take(i0)
        if smoothing:
            smoothing.add(block.e[: i1 - i0], i0, i1)
        # From here on the rows of e are scaled, for dC.
        if again:
            again()
        else:
            x, part, scaled = panel[: len(block.e)], coefficients.rows(slice(i0, i1)), None if dc is None else block.e
            nll_of, lse_of, factors, again = backend.exponentials(block, here, x, part, scaled)
        nll[i0:i1] = nll_of[: i1 - i0]
        if lse is not None:
            lse[i0:i1] = lse_of[: i1 - i0]
        live = counting.wait() if i0 == 0 else live
        if live:
            valid = slice(min(i1, live) - i0)
            of_block = (block, x[valid], factors[valid], i0)
            for gradient in sums:
                gradient.add(*of_block)
        i0 += plan.block
    for gradient in sums:
        gradient.finish(live)
    value = coefficients.loss(nll, lse).sum()
    return value + smoothing.value(problem, lse) if smoothing and live else value


class _SumDE:
    """dE: complete with its block. Contracted in fp32, as many of its columns at a time as the buffer has."""

    def __init__(self, backend, problem, de, buffer, rows, count, smoothing):
        self.backend, self.c, self.de, self.buffer, self.smoothing = backend, problem.c, de, buffer, smoothing
        self.rows, self.count = rows, count

    def add(self, block, x, factors, i0):
        n, d, chunk = len(x), self.de.shape[1], self.buffer.shape[1]
        for d0 in range(0, d, chunk):
            columns = slice(d0, min(d0 + chunk, d))
            product = self.buffer.view(-1)[: n * (columns.stop - d0)].view(n, -1)
            for a, b in recompute.aligned_pieces(0, self.c.shape[0]):
                self.backend.accumulate(x[:, a:b], self.c[a:b, columns], product, first=a == 0)
            less = self.smoothing and self.smoothing.of_rows(i0, i0 + n, columns)
            self.backend.expand_block(product, self.rows, self.count, i0, factors, self.de[:, columns], less=less)

    def finish(self, live):
        if live < self.de.shape[0]:
            self.de.index_fill_(0, self.rows[live:].long(), 0.0)


class _SumDBias:
    """The gradient of the bias, in fp32 over blocks."""

    def __init__(self, backend, dbias, smoothing):
        self.column_sum, self.dbias, self.smoothing, self.total = backend.column_sum, dbias, smoothing, None

    def add(self, block, x, factors, i0):
        column_sum = self.column_sum(x[:, : len(self.dbias)], factors)
        self.total = column_sum if self.total is None else self.total.add_(column_sum)

    def finish(self, live):
        if live == 0:
            self.dbias.zero_()
            return
        if self.smoothing:
            self.total -= self.smoothing.of_bias()
        self.dbias.copy_(self.total)


class _SumDC:
    """dC, a sum over blocks, in fp32."""

    def __init__(self, backend, problem, dc, smoothing, total):
        self.backend, self.problem, self.dc, self.smoothing, self.total = backend, problem, dc, smoothing, total

    def add(self, block, x, factors, i0, row=None):
        for a, b in recompute.aligned_pieces(0, self.dc.shape[0]):
            self.backend.accumulate(x[:, a:b].t(), block.e[: x.shape[0]], self.total[a:b], i0 == 0, row)

    def finish(self, live):
        if live == 0:
            self.dc.zero_()
        elif self.smoothing or self.total is not self.dc:
            self.backend.write_rows(self.total, self.dc, less=self.smoothing and self.smoothing.of_classes())


class _DCOfOneBlock(_SumDC):
    """The same of a single block: written once."""

    row = None

    def add(self, block, x, factors, i0):
        self.row = self.smoothing and self.smoothing.of_every_class()
        super().add(block, x, factors, i0, self.row)

    def finish(self, live):
        if self.row is None:
            super().finish(live)


class _RoundedSumDC(_SumDC):
    """The same in 16 bits, rounded after each block.

    The rows of the most frequent targets, which carry most of the gradient of a language model, are in fp32 all the
    same: they are summed a second time on their own. What the other targets add to their rows is added at the end.
    """

    def __init__(self, backend, problem, dc, smoothing, rows, number):
        super().__init__(backend, problem, dc, smoothing, dc)
        self.rows, self.ids = rows, _frequent(problem, number)
        self.is_frequent = torch.zeros(len(dc), dtype=torch.int8, device=dc.device).index_fill_(0, self.ids, 1)
        new = functools.partial(torch.empty, dtype=torch.float32, device=dc.device)
        self.frequent, self.shares = new((number, dc.shape[1])), new(len(rows)).zero_()

    def add(self, block, x, factors, i0):
        scaled, first = block.e[: x.shape[0]], i0 == 0
        self.backend.accumulate(x.index_select(1, self.ids).t(), scaled, self.frequent, first)
        put_back = self.backend.take_targets(block, x, self.is_frequent, factors, self.shares[i0:])
        super().add(block, x, factors, i0)
        put_back()

    def finish(self, live):
        super().finish(live)
        if live:
            self.backend.add_targets(self.problem, self.rows, self.is_frequent, self.shares, self.dc)
            less = self.smoothing and self.smoothing.of_classes(self.ids)
            self.backend.write_rows(self.frequent, self.dc, at=self.ids, less=less)


def _sum_dc(backend, problem, dc, plan, rows, smoothing):
    """The sum that the plan asks for."""
    if plan.blocks == 1:
        return _DCOfOneBlock(backend, problem, dc, smoothing, dc)
    if 0 < plan.fp32_rows < len(dc):
        return _RoundedSumDC(backend, problem, dc, smoothing, rows, plan.fp32_rows)
    return _SumDC(backend, problem, dc, smoothing, torch.empty_like(dc, dtype=torch.float32) if plan.fp32_rows else dc)


def _frequent(problem, k):
    """The k most frequent targets, of equals the lowest. In ascending order, so that columns close together are read
    together.
    """
    valid = problem.targets != problem.ignore_index
    counts = torch.zeros(problem.c.shape[0], dtype=torch.int32, device=problem.c.device)
    counts.index_add_(0, torch.where(valid, problem.targets, 0), valid.int())
    return counts.argsort(descending=True, stable=True)[:k].sort().values
