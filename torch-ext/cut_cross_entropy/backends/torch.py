"""The primitives in plain torch operations: CPU, MPS, XPU, and CUDA where Triton is absent.

16-bit operands are widened to fp32, a product of two of them is exact there, and panels stay in fp32: the results are
at least as close to the definition as those of the Triton kernels. Logits are formed one tile of columns at a time.
"""

from dataclasses import replace

import torch

from ..planner import DEFAULT_PANEL, PANEL_STEP
from ..problem import Fold, RowGradients

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


def count_on_host(problem, count):
    return int(count), True


class count_later:
    """The count of valid rows, which on a CPU is known at once."""

    known = True

    def __init__(self, problem, count):
        self.now = int(count)

    def wait(self):
        return self.now


def _widened(e, index):
    return e.float() if index.numel() == e.shape[0] else e[index].float()


def compact(e, rows, count, live, known, de):
    """The valid rows in fp32. They do not fit into the storage of a 16-bit dE, which is therefore left alone."""
    return _widened(e, rows[:live].long())


def _tile_logits(problem, e, v0, v1):
    """z[:, v0:v1] in fp32."""
    z = torch.mm(e, problem.c[v0:v1].float().t())
    if problem.bias is not None:
        z += problem.bias[v0:v1].float()
    if problem.scale != 1.0:
        z *= problem.scale
    if problem.softcap is not None:
        z.div_(problem.softcap).tanh_().mul_(problem.softcap)
    if problem.temperature != 1.0:
        z /= problem.temperature
    return z


def fold(problem, rows, count, want_smooth, want_entropy, want_prediction):
    n, (v, _) = problem.e.shape[0], problem.c.shape
    live = int(count)
    index = rows[:live].long()
    e, y = _widened(problem.e, index), problem.targets[index].long()
    m = e.new_full((live,), -torch.inf)
    s, z_y, tilt, weighted = (torch.zeros_like(m) for _ in range(4))
    total, argmax = m.new_zeros(()), torch.zeros_like(y)
    for v0 in range(0, v, PANEL_STEP):
        v1 = min(v0 + PANEL_STEP, v)
        z = _tile_logits(problem, e, v0, v1)
        if want_smooth:
            w = z.new_ones(v1 - v0) if problem.weight is None else problem.weight[v0:v1].float()
            weighted += z @ w
            total += w.sum()
        top, id_top = z.max(1)
        if want_prediction:
            argmax = torch.where(top > m, id_top + v0, argmax)
        here = ((y >= v0) & (y < v1)).nonzero().squeeze(1)
        at = (here, y[here] - v0)
        z_y[here] = z[at]
        z[at] = -torch.inf
        m_new = torch.maximum(m, top)
        base = torch.where(m_new == -torch.inf, 0.0, m_new)
        decay = torch.exp(m - base)
        z -= base.unsqueeze(1)
        p = torch.exp(z)
        if want_entropy:
            drop = torch.where(m == -torch.inf, 0.0, m - base)
            tilt = decay * (tilt + s * drop) + torch.where(p > 0, p * z, p).sum(1)
        s = s * decay + p.sum(1)
        m = m_new
    ahead = m - z_y
    gain = torch.exp(-ahead)
    nll = torch.where(ahead == 0, torch.log1p(s), ahead + torch.log(s + gain))
    s = s + gain
    tilt = tilt - torch.where(gain > 0, gain * ahead, 0.0)
    lse = m + torch.log(s)

    def spread(values, fill=0):
        return values.new_full((n,), fill).index_copy_(0, index, values)

    return Fold(
        nll=spread(nll),
        lse=spread(lse),
        smooth=spread(total * lse - weighted) if want_smooth else None,
        entropy=spread(torch.log(s) - tilt / s) if want_entropy else None,
        prediction=spread(argmax, -1) if want_prediction else None,
        m=spread(m),
        s=spread(s),
        rows=rows,
        count=count,
    )


def panel_unit(problem, gradients):
    return None


def new_panel(e, live, width):
    return torch.empty((live, width), dtype=torch.float32, device=e.device)


def _gradient(log_p, q, w, z, g, h, inv_cap):
    """dz_v of RowGradients, with q = p_v - [v = y] (p_v where None); of a tile or of the targets alone."""
    p = log_p.exp()
    dz = torch.zeros_like(p) if g.nll is None else g.nll * (p if q is None else q)
    if g.rest is not None:
        dz += g.rest * p
    if g.smooth is not None:
        dz -= g.smooth * w
    if g.entropy is not None:
        dz -= g.entropy * torch.where(p > 0, p * (log_p + h), p)
    if inv_cap is not None:
        dz *= 1 - (z * inv_cap).square()
    return dz


def dlogits(problem, e, fold, gradients, live, unit, panel):
    """Returns write(v0, v1): panel[:, : v1 - v0] = dz of the columns v0 to v1 for the `live` rows of a compacted e."""
    index = fold.rows[:live].long()
    y = problem.targets[index].long()
    m, log_s, nll = fold.m[index], fold.s[index].log(), fold.nll[index]
    h = fold.entropy[index] if gradients.entropy is not None else None
    factor = problem.scale / problem.temperature
    inv_cap = None if problem.softcap is None else problem.temperature / problem.softcap
    rows = RowGradients(*(None if g is None else g[index] * factor for g in gradients))
    columns = RowGradients(*(None if g is None else g.unsqueeze(1) for g in rows))
    w = y.new_ones((), dtype=torch.float32) if problem.weight is None else problem.weight.float()
    at_target = _gradient(-nll, torch.expm1(-nll), w[y] if w.dim() else w, (m + log_s) - nll, rows, h, inv_cap)
    h = None if h is None else h.unsqueeze(1)

    def write(v0, v1):
        for a in range(v0, v1, PANEL_STEP):
            b = min(a + PANEL_STEP, v1)
            z = _tile_logits(problem, e, a, b)
            log_p = (z - m.unsqueeze(1)).sub_(log_s.unsqueeze(1))
            tile = panel[:, a - v0 : b - v0]
            tile.copy_(_gradient(log_p, None, w[a:b] if w.dim() else w, z, columns, h, inv_cap))
            here = ((y >= a) & (y < b)).nonzero().squeeze(1)
            tile[here, y[here] - a] = at_target[here]

    return write


def contract_c(panel, e, dc, dbias, unit):
    """dC[panel] = panel.T @ e and dbias[panel] = sum of its rows."""
    if dc is not None:
        if dc.dtype == torch.float32:
            torch.mm(panel.t(), e, out=dc)
        else:
            dc.copy_(torch.mm(panel.t(), e))
    if dbias is not None:
        dbias.copy_(panel.sum(0))


def accumulate(a, b, accumulator, first):
    """accumulator (+)= a @ b in fp32, a 16-bit b widened piece by piece."""
    step = b.shape[0] if b.dtype == torch.float32 else DEFAULT_PANEL
    for k in range(0, b.shape[0], step):
        piece = b[k : k + step].float()
        if first and k == 0:
            torch.mm(a[:, k : k + step], piece, out=accumulator)
        else:
            accumulator.addmm_(a[:, k : k + step], piece)


def expand(accumulator, rows, count, live, known, unit, de):
    """dE rows in their own dtype; exactly 0 where the target is ignored."""
    if live < de.shape[0]:
        de.zero_()
        de[rows[:live].long()] = accumulator.to(de.dtype)
    else:
        de.copy_(accumulator)


def new_rows(e, block, chunk):
    """Room for the rows of a block in fp32, once they are scaled, then for those of dE."""
    rows = torch.empty((block, e.shape[1]), dtype=torch.float32, device=e.device)
    return rows, rows


def block(problem, rows, count, i0, i1, buffer):
    """The problem of the valid rows number i0 to i1, their hidden states in fp32."""
    if int(count) == problem.e.shape[0]:
        return replace(problem, e=problem.e[i0:i1].float(), targets=problem.targets[i0:i1])
    index = rows[i0:i1].long()
    return replace(problem, e=problem.e[index].float(), targets=problem.targets[index])


def exponentials(problem, count, counted, panel, weights, divisor):
    """Fill the panel [N, >= V] with factors such that dz = factors[:, None] * panel. Returns nll and factors, [N].

    panel = exp(z - m) away from the target, minus the sum of these at it; the factor is g / s.
    """
    e, v = problem.e, problem.c.shape[0]
    x, at = panel[:, :v], problem.targets.long().unsqueeze(1)
    for v0 in range(0, v, DEFAULT_PANEL):
        v1 = min(v0 + DEFAULT_PANEL, v)
        x[:, v0:v1] = _tile_logits(problem, e, v0, v1)
    z_y = x.gather(1, at)
    m = x.amax(1, keepdim=True)
    base = torch.where(m == -torch.inf, 0.0, m)
    slope = None
    if problem.softcap is not None:
        slope = 1 - (x * (problem.temperature / problem.softcap)).square_()
    x.sub_(base).exp_()
    gain = x.gather(1, at)
    x.scatter_(1, at, 0.0)
    s = x.sum(1, keepdim=True)
    x.scatter_(1, at, -s)
    if slope is not None:
        x.mul_(slope)
    ahead = m - z_y
    nll = torch.where(ahead < 40, torch.log1p(s * torch.exp(ahead)), ahead + torch.log(s + gain))
    g = torch.full_like(s, problem.scale / problem.temperature)
    if weights is not None:
        g = g * weights.unsqueeze(1)
    if divisor is not None:
        g = torch.where(divisor == 0, 0.0, g / divisor)
    return nll.squeeze(1), (g / (s + gain)).squeeze(1)


def expand_block(accumulator, rows, count, first, factors, de):
    """dE[rows[first + i]] = accumulator[i] * factors[i], rounded once."""
    n = accumulator.shape[0]
    de[rows[first : first + n].long()] = (accumulator * factors.unsqueeze(1)).to(de.dtype)


def scale(upstream, *gradients):
    """Multiply the gradients by a 0-d upstream gradient, in place. A gradient of 0, as of an ignored row, stays 0."""
    if upstream == 1:
        return
    for gradient in gradients:
        gradient.copy_(gradient * upstream if upstream.isfinite() else torch.where(gradient == 0, 0, gradient * upstream))
