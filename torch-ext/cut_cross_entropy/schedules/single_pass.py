"""Schedule `single_pass`: loss and gradients of a scalar loss in one sweep over blocks of tokens.

6 N V D floating-point operations: the logits are formed once. Scratch: the panel of one block, [block, V], and dC in
fp32 where many blocks add to it.
"""

import torch

from ..problem import RowGradients
from . import recompute


def loss_and_gradients(backend, problem, weights, divisor, mean, workspace, schedule, de, dc):
    """sum_i weights_i * nll_i / divisor over the valid rows, its gradients written to dE and dC (None: not wanted).

    weights [N] and divisor 0-d are fp32 and default to 1; with `mean` the divisor is the number of valid rows. Where
    `schedule` is "auto" and `recompute` the better plan, that is what runs.
    """
    (n, d), v = problem.e.shape, problem.c.shape[0]
    rows, count = backend.select(problem.targets, problem.ignore_index, v)
    live, known = backend.count_on_host(problem, count) if n else (0, True)
    together = known and live == n
    if mean:
        divisor = count[0].float()
    needs = (de is not None, dc is not None, False)
    plan = recompute.planned(
        backend, problem.e, v, needs, workspace,
        valid=live, compacted=not together, schedule=schedule if live and d else "recompute", scalar=True,
    )  # fmt: skip
    if plan.schedule == "recompute":
        fold = backend.fold(problem, rows, count, False, False, False)
        g = torch.ones_like(fold.nll) if weights is None else weights
        g = RowGradients(g if divisor is None else _divided(g, divisor), None, None, None)
        recompute.backward(backend, problem, fold, g, *needs, workspace, de, dc, None)
        return _total(fold.nll, weights, divisor)

    if weights is not None and not together:
        weights = weights[rows[:live].long().clamp(0, n - 1)]
    nll = torch.empty(live, dtype=torch.float32, device=problem.e.device)
    panel = backend.new_panel(problem.e, plan.block, plan.panel)
    narrow, wide = backend.new_rows(problem.e, plan.block, plan.chunk)
    total = dc
    if "forward:fp32 dC" in plan.parts:
        total = torch.empty(dc.shape, dtype=torch.float32, device=dc.device)
    if de is not None and not together:
        de.zero_()
    for i0 in range(0, live, plan.block):
        i1 = min(i0 + plan.block, live)
        block = backend.block(problem, rows, count, i0, i1, together, narrow)
        x, scaled = panel[: i1 - i0], narrow[: i1 - i0]
        weighted = None if weights is None else weights[i0:i1]
        nll[i0:i1], factors = backend.exponentials(block, x, weighted, divisor)
        if dc is not None:
            torch.mul(block.e, factors.unsqueeze(1), out=scaled)
            for a, b in recompute.aligned_pieces(0, v):
                backend.accumulate(x[:, a:b].t(), scaled, total[a:b], first=i0 == 0)
        if de is not None:
            for j0 in range(0, i1 - i0, plan.chunk):
                j1 = min(j0 + plan.chunk, i1 - i0)
                for a, b in recompute.aligned_pieces(0, v):
                    backend.accumulate(x[j0:j1, a:b], problem.c[a:b], wide[: j1 - j0], first=a == 0)
                backend.expand_block(wide[: j1 - j0], rows, count, i0 + j0, factors[j0:j1], de)
    if total is not dc:
        dc.copy_(total)
    return _total(nll, weights, divisor)


def _total(nll, weights, divisor):
    total = (nll if weights is None else weights * nll).sum()
    return total if divisor is None else _divided(total, divisor)


def _divided(x, divisor):
    return torch.where(divisor == 0, 0.0, x / divisor)
