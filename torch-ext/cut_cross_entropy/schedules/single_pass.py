"""Schedule `single_pass`: loss and gradients of a scalar loss in one sweep over blocks of tokens.

6 N V D floating-point operations: the logits are formed once. Scratch: the panel of one block, [block, V], and fp32
sums for dC where several blocks add to it.
"""

import functools

import torch

from ..planner import frequent_ids
from ..problem import Coefficients
from . import recompute


def planned(backend, e, v, needs, workspace, schedule):
    """The plan of a scalar loss with gradients; where e is empty, that of `recompute`."""
    schedule = schedule if e.numel() else "recompute"
    return recompute.planned(backend, e, v, needs, workspace, schedule=schedule, scalar=True)


def loss_and_gradients(backend, problem, weights, square, smooth, mean, gradients, workspace, schedule):
    """The sum over the valid rows of the loss of these coefficients, and its gradients.

    Where there are no weights they are 1, or with `mean` 1 over the number of valid rows. Where `schedule` is "auto"
    and `recompute` the better plan, that is what runs.
    """
    n, v, (de, dc, dbias) = problem.e.shape[0], problem.c.shape[0], gradients
    plan = planned(backend, problem.e, v, gradients.wanted, workspace, schedule)
    rows, count = backend.select(problem.targets, problem.ignore_index, v)
    if weights is None:
        one = count.float().clamp_(min=1.0).reciprocal_() if mean else problem.e.new_ones(1, dtype=torch.float32)
        weights = one.expand(n)
    coefficients = Coefficients(weights, square, smooth)
    if plan.schedule == "recompute":
        fold = backend.fold(problem, rows, count, smooth is not None, False, False)
        upstream = coefficients.gradients(problem, fold.lse)._replace(smooth=smooth)
        recompute.backward(backend, problem, fold, upstream, gradients, workspace)
        return coefficients.loss(fold.nll, fold.lse, fold.smooth).sum()

    # In the order of the rows listed.
    coefficients = Coefficients(*(x if x is None or x.stride(0) == 0 else x[rows.long()] for x in coefficients))
    panel = backend.new_panel(problem.e, plan.block, plan.panel)
    narrow, wide = backend.new_rows(problem.e, plan.block, plan.chunk)
    total, bias_total = None if dc is None else _Sum(backend, plan, problem, dc), None
    smoothing = None if smooth is None else _Smoothing(backend, problem, coefficients.smooth)
    nll = torch.zeros(n, dtype=torch.float32, device=problem.e.device)
    lse = torch.zeros_like(nll) if smoothing or square is not None else None
    # The count is on its way to the host while the first block is folded.
    counting = backend.count_later(problem, count)
    live, i0 = counting.now, 0
    while i0 == 0 or i0 < live:
        i1 = min(i0 + plan.block, n if live is None else live)
        block = backend.block(problem, rows, count, i0, i1, narrow)
        if smoothing:
            smoothing.add(block.e, i0, i1)
        counted, part = live is None and counting.known, coefficients.rows(slice(i0, i1))
        x, scaled = panel[: i1 - i0], None if dc is None else block.e
        nll[i0:i1], lse_of, factors = backend.exponentials(block, count, counted, x, part, scaled)
        if lse is not None:
            lse[i0:i1] = lse_of
        if i0 == 0:
            live = counting.wait()
            i1 = min(i1, live)
            x = x[:i1]
            if de is not None and live < n:
                de.index_fill_(0, rows[live:].long(), 0.0)
            if live == 0:
                for gradient in (dc, dbias):
                    if gradient is not None:
                        gradient.zero_()
                break
        if dc is not None:
            total.add(x, scaled[: i1 - i0], first=i0 == 0)
        if dbias is not None:
            column_sum = backend.column_sum(x[:, :v], factors[: i1 - i0])
            bias_total = column_sum if bias_total is None else bias_total.add_(column_sum)
        if de is not None:
            for j0 in range(0, i1 - i0, plan.chunk):
                j1 = min(j0 + plan.chunk, i1 - i0)
                for a, b in recompute.aligned_pieces(0, v):
                    backend.accumulate(x[j0:j1, a:b], problem.c[a:b], wide[: j1 - j0], first=a == 0)
                less = smoothing and smoothing.of_rows(i0 + j0, i0 + j1)
                backend.expand_block(wide[: j1 - j0], rows, count, i0 + j0, factors[j0:j1], de, less=less)
        i0 += plan.block
    if live and dc is not None:
        total.finish(smoothing)
    if bias_total is not None:
        if smoothing:
            bias_total -= smoothing.weight * smoothing.smooth.sum()
        dbias.copy_(bias_total)
    value = coefficients.loss(nll, lse).sum()
    return value + smoothing.value(problem, lse) if smoothing and live else value


class _Smoothing:
    """What label smoothing adds to dz beside a multiple of p, - smooth_i * w_v: of rank one, so it never meets a panel.

    With S = sum_v w_v c_v and T = sum_i smooth_i e_i, both [D], it is - smooth_i * S in dE and - w_v * T in dC.
    """

    def __init__(self, backend, problem, smooth):
        self.column_sum, self.smooth, self.factor = backend.column_sum, smooth, problem.scale / problem.temperature
        self.weight = problem.weight
        if self.weight is None:
            self.weight = smooth.new_ones(problem.c.shape[0])
        self.weight = self.weight.float() * self.factor
        self.classes = backend.column_sum(problem.c, problem.weight).mul_(self.factor)
        self.tokens = torch.zeros_like(self.classes)

    def add(self, e, i0, i1):
        self.tokens += self.column_sum(e, self.smooth[i0:i1])

    def of_rows(self, i0, i1):
        return self.smooth[i0:i1], self.classes

    def of_classes(self, ids=slice(None)):
        return self.weight[ids], self.tokens

    def value(self, problem, lse):
        value = problem.total_weight * (self.smooth * lse).sum() - (self.tokens * self.classes).sum()
        if problem.bias is None:
            return value
        return value - (self.weight * problem.bias.float()).sum() * self.smooth.sum()


class _Sum:
    """dC as a sum over blocks: of one block rounded once, of several in 16 bits, rounded after each, or in fp32.

    Where in 16 bits, the rows of the most frequent targets, which carry most of the gradient of a language model, are
    in fp32 all the same: they are summed a second time on their own.
    """

    def __init__(self, backend, plan, problem, dc):
        self.backend, self.dc, self.ids = backend, dc, None
        self.total, self.frequent = dc, None
        (v, d), new = dc.shape, functools.partial(torch.empty, dtype=torch.float32, device=dc.device)
        if "forward:fp32 dC" in plan.parts:
            self.total = new((v, d))
        elif "forward:fp32 dC of frequent ids" in plan.parts:
            self.ids = _frequent(problem, frequent_ids(problem.e.shape[0], plan.blocks))
            self.frequent = new((len(self.ids), d))

    def add(self, x, scaled, first):
        for a, b in recompute.aligned_pieces(0, self.dc.shape[0]):
            self.backend.accumulate(x[:, a:b].t(), scaled, self.total[a:b], first)
        if self.ids is not None:
            self.backend.accumulate(x.index_select(1, self.ids).t(), scaled, self.frequent, first)

    def finish(self, smoothing):
        less = smoothing and smoothing.of_classes()
        if smoothing or self.total is not self.dc:
            self.backend.write_rows(self.total, self.dc, less=less)
        if self.ids is not None:
            less = smoothing and smoothing.of_classes(self.ids)
            self.backend.write_rows(self.frequent, self.dc, at=self.ids, less=less)


def _frequent(problem, k):
    """The k most frequent targets, of equals the lowest."""
    valid = problem.targets != problem.ignore_index
    counts = torch.zeros(problem.c.shape[0], dtype=torch.int32, device=problem.c.device)
    counts.index_add_(0, torch.where(valid, problem.targets, 0), valid.int())
    return counts.argsort(descending=True, stable=True)[:k]
