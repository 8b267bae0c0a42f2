"""The primitives in plain torch operations: CPU, MPS, XPU, and CUDA where Triton is absent.

16-bit operands are widened to fp32, a product of two of them is exact there, and panels stay in fp32: the results are
at least as close to the definition as those of the Triton kernels. Logits are formed one tile of columns at a time.
"""

import torch

from ..planner import PANEL_STEP
from ..problem import Fold

NAME = "torch"


def select(targets, ignore_index, v):
    """The valid rows and their count. Raises IndexError for a target that is neither ignored nor a class."""
    rows = (targets != ignore_index).nonzero().squeeze(1)
    chosen = targets[rows]
    outside = chosen[(chosen < 0) | (chosen >= v)]
    if outside.numel():
        raise IndexError(f"targets: got {outside[0].item()}, accepted are 0 <= target < V = {v} and the ignore_index")
    padded = torch.zeros(targets.numel(), dtype=torch.int32, device=targets.device)
    padded[: rows.numel()] = rows
    return padded, torch.full((1,), rows.numel(), dtype=torch.int32, device=targets.device)


def count_on_host(count, n):
    return int(count), True


def fold_splits(n, v, d, dtype, device):
    return 1


def _widened(e, index):
    return e.float() if index.numel() == e.shape[0] else e[index].float()


def compact(e, rows, count, live, known, de):
    """The valid rows in fp32. They do not fit into the storage of a 16-bit dE, which is therefore left alone."""
    return _widened(e, rows[:live].long())


def _tile_logits(problem, e, v0, v1, out=None):
    """z[:, v0:v1] in fp32, and tanh where there is a softcap."""
    z = torch.mm(e, problem.c[v0:v1].float().t(), out=out)
    if problem.bias is not None:
        z += problem.bias[v0:v1].float()
    if problem.scale != 1.0:
        z *= problem.scale
    capped = None
    if problem.softcap is not None:
        capped = torch.tanh(z / problem.softcap)
        torch.mul(capped, problem.softcap, out=z)
    if problem.temperature != 1.0:
        z /= problem.temperature
    return z, capped


def fold(problem, rows, count, splits, want_smooth, want_entropy, want_prediction):
    n, (v, _) = problem.e.shape[0], problem.c.shape
    live = int(count)
    index = rows[:live].long()
    e, y = _widened(problem.e, index), problem.targets[index].long()
    m = e.new_full((live,), -torch.inf)
    s, z_y, tilt, weighted = (torch.zeros_like(m) for _ in range(4))
    weight_seen = m.new_zeros(())
    best, best_id = m.clone(), torch.zeros_like(y)
    for v0 in range(0, v, PANEL_STEP):
        v1 = min(v0 + PANEL_STEP, v)
        z, _ = _tile_logits(problem, e, v0, v1)
        here = (y >= v0) & (y < v1)
        z_y = torch.where(here, z.gather(1, (y - v0).clamp(0, v1 - v0 - 1).unsqueeze(1)).squeeze(1), z_y)
        top, at = z.max(1)
        m_new = torch.maximum(m, top)
        base = torch.where(m_new == -torch.inf, 0.0, m_new)
        old = torch.where(m == -torch.inf, base, m)
        if want_prediction:
            better = (top > best) | (top.isnan() & ~best.isnan())
            best, best_id = torch.where(better, top, best), torch.where(better, at + v0, best_id)
        z -= base.unsqueeze(1)
        if want_smooth:
            w = z.new_ones(v1 - v0) if problem.weight is None else problem.weight[v0:v1].float()
            weighted += weight_seen * (old - base) + z @ w
            weight_seen = weight_seen + w.sum()
        p = torch.exp(z)
        decay = torch.exp(m - base)
        if want_entropy:
            tilt = decay * (tilt + s * (old - base)) + torch.where(p > 0, p * z, p).sum(1)
        s = s * decay + p.sum(1)
        m = m_new
    log_s = torch.log(s)

    def spread(values, fill=0):
        return values.new_full((n,), fill).index_copy_(0, index, values)

    base = torch.where(m == -torch.inf, 0.0, m)
    return Fold(
        nll=spread((m - z_y) + log_s),
        lse=spread(m + log_s),
        smooth=spread(weight_seen * ((m - base) + log_s) - weighted) if want_smooth else None,
        entropy=spread(log_s - tilt / s) if want_entropy else None,
        prediction=spread(best_id, -1) if want_prediction else None,
        m=spread(m),
        log_s=spread(log_s),
        rows=rows,
        count=count,
    )


def panel_unit(dtype, targets, ignore_index, gradients):
    return None


def new_panel(e, live, width):
    return torch.empty((live, width), dtype=torch.float32, device=e.device)


def dlogits(problem, e, v0, v1, fold, gradients, live, unit, panel):
    """panel[:, : v1 - v0] = dz for the columns v0 to v1 (RowGradients has the formula), times dz/d(e.c)."""
    index = fold.rows[:live].long()
    y = problem.targets[index].long()
    m, log_s, nll = (t[index] for t in (fold.m, fold.log_s, fold.nll))
    zero = m.new_zeros(())
    g_nll, g_rest = (zero if g is None else g[index] for g in (gradients.nll, gradients.rest))
    for a in range(v0, v1, PANEL_STEP):
        b = min(a + PANEL_STEP, v1)
        tile = panel[:, a - v0 : b - v0]
        tile, capped = _tile_logits(problem, e, a, b, out=tile)
        tile -= m.unsqueeze(1)
        tile -= log_s.unsqueeze(1)
        log_p = tile.clone() if gradients.entropy is not None else None
        tile.exp_()
        here = ((y >= a) & (y < b)).nonzero().squeeze(1)
        at = (here, y[here] - a)
        confident = g_nll.expand_as(m)[here] * torch.expm1(-nll[here]) + g_rest.expand_as(m)[here] * tile[at]
        if log_p is not None:
            g, h = gradients.entropy[index], fold.entropy[index]
            tilt = torch.where(tile > 0, tile * (log_p + h.unsqueeze(1)), tile) * g.unsqueeze(1)
            confident -= tilt[at]
        tile *= (g_nll + g_rest).expand_as(m).unsqueeze(1)
        if log_p is not None:
            tile -= tilt
        tile[at] = confident
        if gradients.smooth is not None:
            w = tile.new_ones(b - a) if problem.weight is None else problem.weight[a:b].float()
            tile -= torch.outer(gradients.smooth[index], w)
        if capped is not None:
            tile *= capped.square_().neg_().add_(1)
        factor = problem.scale / problem.temperature
        if factor != 1.0:
            tile *= factor


def contract_c(panel, e, dc, dbias, unit):
    """dC[panel] = panel.T @ e and dbias[panel] = sum of its rows."""
    if dc is not None:
        if dc.dtype == torch.float32:
            torch.mm(panel.t(), e, out=dc)
        else:
            dc.copy_(torch.mm(panel.t(), e))
    if dbias is not None:
        dbias.copy_(panel.sum(0))


def contract_e(panel, c, accumulator, first):
    """accumulator (+)= panel @ c[panel] in fp32."""
    if first:
        torch.mm(panel, c.float(), out=accumulator)
    else:
        accumulator.addmm_(panel, c.float())


def expand(accumulator, rows, count, live, known, unit, de):
    """dE rows in their own dtype; exactly 0 where the target is ignored."""
    if live < de.shape[0]:
        de.zero_()
        de[rows[:live].long()] = accumulator.to(de.dtype)
    else:
        de.copy_(accumulator)
