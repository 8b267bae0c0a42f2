"""Schedule `single_pass`: loss and gradients of a scalar loss in one sweep over blocks of tokens.

6 N V D floating-point operations: the logits are formed once. Scratch: the panel of one block, [block, V], and fp32
sums for dC where several blocks add to it.
"""

import functools

import torch

from ..planner import FREQUENT
from ..problem import ScalarLoss
from . import recompute


def planned(backend, e, v, needs, workspace, schedule):
    """The plan of a scalar loss with gradients; where e is empty, that of `recompute`."""
    schedule = schedule if e.numel() else "recompute"
    return recompute.planned(backend, e, v, needs, workspace, schedule=schedule, scalar=True)


def loss_and_gradients(backend, problem, weights, square, mean, gradients, workspace, schedule):
    """sum_i weights_i * nll_i + square_i * lse_i^2 over the valid rows, and its gradients.

    Coefficients are fp32 [N] or None; weights are then 1, or with `mean` 1 over the number of valid rows. Where
    `schedule` is "auto" and `recompute` the better plan, that is what runs.
    """
    n, v, (de, dc, dbias) = problem.e.shape[0], problem.c.shape[0], gradients
    plan = planned(backend, problem.e, v, gradients.wanted, workspace, schedule)
    rows, count = backend.select(problem.targets, problem.ignore_index, v)
    if weights is None:
        one = count.float().clamp_(min=1.0).reciprocal_() if mean else problem.e.new_ones(1, dtype=torch.float32)
        weights = one.expand(n)
    loss = ScalarLoss(weights, square)
    if plan.schedule == "recompute":
        fold = backend.fold(problem, rows, count, False, False, False)
        recompute.backward(backend, problem, fold, loss.gradients(fold.lse), gradients, workspace)
        return loss.value(fold.nll, fold.lse)

    # By number among the valid rows; what is listed after those is any row.
    loss = ScalarLoss(*(x if x is None or x.stride(0) == 0 else x[rows.long().clamp(0, n - 1)] for x in loss))
    panel = backend.new_panel(problem.e, plan.block, plan.panel)
    narrow, wide = backend.new_rows(problem.e, plan.block, plan.chunk)
    total, bias_total = None if dc is None else _Sum(backend, plan, problem, dc), None
    nll = torch.zeros(n, dtype=torch.float32, device=problem.e.device)
    lse = None if square is None else torch.zeros_like(nll)
    # The count is on its way to the host while the first block is folded.
    counting = backend.count_later(problem, count)
    live, i0 = counting.now, 0
    while i0 == 0 or i0 < live:
        i1 = min(i0 + plan.block, n if live is None else live)
        block = backend.block(problem, rows, count, i0, i1, narrow)
        counted, part = live is None and counting.known, loss.rows(slice(i0, i1))
        nll[i0:i1], lse_of, factors = backend.exponentials(block, count, counted, panel[: i1 - i0], part)
        if square is not None:
            lse[i0:i1] = lse_of
        if i0 == 0:
            live = counting.wait()
            i1 = min(i1, live)
            if de is not None and (live < n or not counting.known):
                de.zero_()
            if live == 0:
                for gradient in (dc, dbias):
                    if gradient is not None:
                        gradient.zero_()
                break
        x, scaled = panel[: i1 - i0], narrow[: i1 - i0]
        if dc is not None:
            torch.mul(block.e[: i1 - i0], factors[: i1 - i0].unsqueeze(1), out=scaled)
            total.add(x, scaled, first=i0 == 0)
        if dbias is not None:
            column_sum = backend.column_sum(x[:, :v], factors[: i1 - i0])
            bias_total = column_sum if bias_total is None else bias_total.add_(column_sum)
        if de is not None:
            for j0 in range(0, i1 - i0, plan.chunk):
                j1 = min(j0 + plan.chunk, i1 - i0)
                for a, b in recompute.aligned_pieces(0, v):
                    backend.accumulate(x[j0:j1, a:b], problem.c[a:b], wide[: j1 - j0], first=a == 0)
                backend.expand_block(wide[: j1 - j0], rows, count, i0 + j0, factors[j0:j1], de)
        i0 += plan.block
    if live and dc is not None:
        total.finish()
    if bias_total is not None:
        dbias.copy_(bias_total)
    return loss.value(nll, lse)


class _Sum:
    """dC as a sum over blocks: of one block rounded once, of many in fp32.

    Of a few in 16 bits, rounded after each; but the rows of the most frequent targets, which carry most of the
    gradient of a language model, in fp32 then too: they are summed a second time on their own.
    """

    def __init__(self, backend, plan, problem, dc):
        self.accumulate, self.dc, self.ids = backend.accumulate, dc, None
        self.total, self.frequent = dc, None
        (v, d), new = dc.shape, functools.partial(torch.empty, dtype=torch.float32, device=dc.device)
        if "forward:fp32 dC" in plan.parts:
            self.total = new((v, d))
        elif "forward:fp32 dC of frequent ids" in plan.parts:
            self.ids, self.frequent = _frequent(problem, FREQUENT), new((FREQUENT, d))

    def add(self, x, scaled, first):
        for a, b in recompute.aligned_pieces(0, self.dc.shape[0]):
            self.accumulate(x[:, a:b].t(), scaled, self.total[a:b], first)
        if self.ids is not None:
            self.accumulate(x.index_select(1, self.ids).t(), scaled, self.frequent, first)

    def finish(self):
        if self.total is not self.dc:
            self.dc.copy_(self.total)
        if self.ids is not None:
            self.dc.index_copy_(0, self.ids, self.frequent.to(self.dc.dtype))


def _frequent(problem, k):
    """The k most frequent targets, of equals the lowest."""
    valid = problem.targets != problem.ignore_index
    counts = torch.zeros(problem.c.shape[0], dtype=torch.int32, device=problem.c.device)
    counts.index_add_(0, torch.where(valid, problem.targets, 0), valid.int())
    return counts.argsort(descending=True, stable=True)[:k]
