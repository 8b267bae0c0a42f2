"""The primitives in plain torch operations: CPU, MPS, XPU, and CUDA where Triton is absent.

16-bit operands are widened to fp32, a product of two of them is exact there, and panels stay in fp32: the results are
at least as close to the definition as those of the Triton kernels.

Logits lie transposed, [columns, rows]: products write into a tile or a panel without a copy, and sums over the
vocabulary add contiguous vectors. A tile stays in a CPU's cache from the product that writes it to the last pass.
"""

import functools
import math
from dataclasses import replace

import torch

from ..planner import TILE_COLUMNS, TILE_ROWS
from ..problem import Fold, RowGradients

NAME = "torch"

# Tokens and vocabulary columns of a tile of logits; COLUMNS rows of a 16-bit operand are widened at a time.
ROWS, COLUMNS = TILE_ROWS, TILE_COLUMNS


def _steps(start, stop, step):
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]


def _slices(problem, z, entropy=False):
    """Pieces of a tile, as (start, stop): passes that need more arrays take an eighth of it at a time."""
    arrays = (problem.softcap is not None) + entropy
    return _steps(0, z.shape[0], COLUMNS // 8 // arrays if arrays else COLUMNS)


def select(targets, ignore_index, v):
    """All rows, the valid ones first, and how many those are.

    Raises IndexError for a target that is neither ignored nor a class.
    """
    valid = targets != ignore_index
    rows, ignored = valid.nonzero().squeeze(1), valid.logical_not().nonzero().squeeze(1)
    chosen = targets[rows]
    outside = chosen[(chosen < 0) | (chosen >= v)]
    if outside.numel():
        raise IndexError(f"targets: got {outside[0].item()}, accepted are 0 <= target < V = {v} and the ignore_index")
    count = torch.full((1,), rows.numel(), dtype=torch.int32, device=targets.device)
    return torch.cat((rows, ignored)).int(), count


def reads_count(problem):
    return True


class count_later:
    """The count of valid rows, which on a CPU is known at once."""

    known = True

    def __init__(self, problem, count):
        self.now = int(count)

    def wait(self):
        return self.now


def compact(e, rows, count, live, known, de):
    """The valid rows in fp32. They do not fit into the storage of a 16-bit dE, which is therefore left alone."""
    return e.float() if live == e.shape[0] else e[rows[:live].long()].float()


def new_rows(e, block, chunk):
    """Room for the rows of a block in fp32: of e, scaled in place, then of dE."""
    rows = torch.empty((block, e.shape[1]), dtype=torch.float32, device=e.device)
    return rows, rows


class Blocks:
    """The valid rows, so many at a time, their hidden states in fp32 in the buffer."""

    def __init__(self, problem, rows, count, size, buffer, known=True):
        self.problem, self.rows, self.size, self.buffer = problem, rows[: int(count)], size, buffer

    def take(self, i0):
        """The block from row i0 of the list on, and that all of its rows are to be folded."""
        index = self.rows[i0 : i0 + self.size].long()
        e = self.buffer[: len(index)].copy_(self.problem.e[index])
        return replace(self.problem, e=e, targets=self.problem.targets[index]), None


def _logits(problem, v0, v1, out):
    """out [v1 - v0, N] = z[:, v0:v1].T in fp32. Hidden states are fp32 already."""
    z = torch.mm(problem.c[v0:v1].float(), problem.e.t(), out=out)
    if problem.bias is not None:
        z += problem.bias[v0:v1, None].float()
    if problem.scale != 1.0:
        z *= problem.scale
    if problem.softcap is not None:
        z.div_(problem.softcap).tanh_().mul_(problem.softcap)
    if problem.temperature != 1.0:
        z /= problem.temperature
    return z


def _slope(problem, z):
    """d z / d (e @ c.T) over scale / temperature; None where that is 1."""
    if problem.softcap is None:
        return None
    return (z * (problem.temperature / problem.softcap)).square_().neg_().add_(1.0)


def fold(problem, rows, count, want_smooth, want_entropy, want_prediction):
    n, live = problem.e.shape[0], int(count)

    def by_token(wanted=True, fill=0.0):
        return torch.full((n,), fill, device=problem.e.device) if wanted else None

    out = Fold(
        *(by_token(), by_token(), by_token(want_smooth), by_token(want_entropy), by_token(want_prediction, -1)),
        *(by_token(), by_token(), rows, count),
    )
    buffer, _ = new_rows(problem.e, min(live, ROWS), 0)
    blocks = Blocks(problem, rows, count, ROWS, buffer)
    for i0, i1 in _steps(0, live, ROWS):
        found = _fold(blocks.take(i0)[0], want_smooth, want_entropy, want_prediction)
        index = rows[i0:i1].long()
        for name, values in found.items():
            getattr(out, name)[index] = values
    return out


def _fold(problem, want_smooth, want_entropy, want_prediction):
    """The fields of `Fold` for few rows, all of them valid."""
    e, v, y = problem.e, problem.c.shape[0], problem.targets.long()
    m = e.new_full(y.shape, -torch.inf)
    s, z_y, pz, weighted = (torch.zeros_like(m) for _ in range(4))
    total, argmax = m.new_zeros(()), torch.zeros_like(y)
    # The entropy needs p and log p: two tiles, or two halves.
    columns = min(v, COLUMNS // 2 if want_entropy else COLUMNS)
    buffer = e.new_empty((1 + want_entropy, columns, *y.shape))
    for v0, v1 in _steps(0, v, columns):
        z = _logits(problem, v0, v1, buffer[0, : v1 - v0])
        if want_smooth:
            w = z.new_ones(v1 - v0) if problem.weight is None else problem.weight[v0:v1].float()
            weighted += w @ z
            total += w.sum()
        if want_prediction:
            top, id_top = z.max(0)
            argmax = torch.where(top > m, id_top + v0, argmax)
        else:
            top = z.amax(0)
        here = ((y >= v0) & (y < v1)).nonzero().squeeze(1)
        at = (y[here] - v0, here)
        z_y[here] = z[at]
        z[at] = -torch.inf
        m_new = torch.maximum(m, top)
        base = torch.where(m_new == -torch.inf, 0.0, m_new)
        decay = torch.exp(m - base)
        z -= base
        p = torch.exp(z, out=buffer[-1, : v1 - v0])
        if want_entropy:
            drop = torch.where(m == -torch.inf, 0.0, m - base)
            pz = decay * (pz + s * drop) + z.mul_(p).masked_fill_(p == 0, 0.0).sum(0)
        s = s * decay + p.sum(0)
        m = m_new
    ahead = m - z_y
    gain = torch.exp(-ahead)
    nll = torch.where(ahead == 0, torch.log1p(s), ahead + torch.log(s + gain))
    s = s + gain
    found = {"nll": nll, "lse": m + torch.log(s), "m": m, "s": s}
    if want_smooth:
        found["smooth"] = total * found["lse"] - weighted
    if want_entropy:
        pz = pz - torch.where(gain > 0, gain * ahead, 0.0)
        found["entropy"] = torch.log(s) - pz / s
    if want_prediction:
        found["prediction"] = argmax
    return found


def panel_unit(problem, gradients):
    return None


def new_panel(e, live, width):
    """[live, width] fp32, columns contiguous."""
    return torch.empty((width, live), dtype=torch.float32, device=e.device).t()


def _gradient(log_p, on_p, g, w, h):
    """on_p * p - smooth * w - entropy * p * (log p + h), in place of log_p, with the smooth and entropy of g."""
    if g.entropy is None:
        dz = log_p.exp_().mul_(on_p)
    else:
        p = log_p.exp()
        dz = log_p.add_(h).mul_(p).masked_fill_(p == 0, 0.0).mul_(-g.entropy).addcmul_(p, on_p)
    return dz if g.smooth is None else dz.addcmul_(g.smooth, w, value=-1.0)


def dlogits(problem, e, fold, gradients, live, unit, panel):
    """Returns write(v0, v1): panel[:, : v1 - v0] = dz of the columns v0 to v1 for the `live` rows of a compacted e."""
    index = fold.rows[:live].long()
    y = problem.targets[index].long()
    m, log_s, nll = fold.m[index], fold.s[index].log(), fold.nll[index]
    h = fold.entropy[index] if gradients.entropy is not None else None
    factor = problem.scale / problem.temperature
    g = RowGradients(*(None if x is None else x[index] * factor for x in gradients))
    w = m.new_ones(1) if problem.weight is None else problem.weight.float()
    rest = torch.zeros_like(m) if g.rest is None else g.rest
    on_p = rest if g.nll is None else rest + g.nll

    at_target = _gradient(-nll, rest, g, w if problem.weight is None else w[y], h)
    if g.nll is not None:
        at_target += g.nll * torch.expm1(-nll)
    slope = _slope(problem, (m + log_s) - nll)
    if slope is not None:
        at_target *= slope

    def write_slice(z, a, b, some):
        slope = _slope(problem, z)
        log_p = z.sub_(m[some]).sub_(log_s[some])
        g_some = RowGradients(*(None if x is None else x[some] for x in g))
        dz = _gradient(log_p, on_p[some], g_some, w[a:b, None] if w.numel() > 1 else w, None if h is None else h[some])
        if slope is not None:
            dz *= slope

    def write(v0, v1):
        for i0, i1 in _steps(0, live, ROWS):
            part = replace(problem, e=e[i0:i1])
            for a, b in _steps(v0, v1, COLUMNS):
                z = _logits(part, a, b, panel[i0:i1, a - v0 : b - v0].t())
                for k0, k1 in _slices(problem, z, h is not None):
                    write_slice(z[k0:k1], a + k0, a + k1, slice(i0, i1))
        here = ((y >= v0) & (y < v1)).nonzero().squeeze(1)
        panel[here, y[here] - v0] = at_target[here]

    return write


def contract_c(panel, e, dc, dbias, unit, row=None):
    """dC[panel] = panel.T @ e, + row in each of its rows, and dbias[panel] = sum of its rows."""
    if dc is not None:
        accumulate(panel.t(), e, dc, first=True, row=row)
    if dbias is not None:
        dbias.copy_(panel.sum(0))


def accumulate(a, b, accumulator, first, row=None):
    """accumulator (+)= a @ b in fp32, a 16-bit b widened and a 16-bit accumulator rounded piece by piece.

    With the first product a row may be added to each of its rows.
    """
    start = torch.mm if row is None else functools.partial(torch.addmm, row)
    if accumulator.dtype != torch.float32:
        for i0, i1 in _steps(0, a.shape[0], COLUMNS):
            if first:
                accumulator[i0:i1] = start(a[i0:i1], b)
            else:
                accumulator[i0:i1] = torch.mm(a[i0:i1], b).add_(accumulator[i0:i1])
        return
    for k0, k1 in _steps(0, b.shape[0], b.shape[0] if b.dtype == torch.float32 else COLUMNS):
        if first and k0 == 0:
            start(a[:, k0:k1], b[k0:k1].float(), out=accumulator)
        else:
            accumulator.addmm_(a[:, k0:k1], b[k0:k1].float())


def column_sum(matrix, weight=None):
    """sum_r weight_r matrix_r, fp32; the weights default to 1. 16-bit rows are widened piece by piece."""
    total = matrix.new_zeros(matrix.shape[1], dtype=torch.float32)
    for r0, r1 in _steps(0, matrix.shape[0], COLUMNS):
        x = matrix[r0:r1].float()
        total += x.sum(0) if weight is None else weight[r0:r1].float() @ x
    return total


def expand(accumulator, rows, count, live, known, unit, de):
    """dE rows in their own dtype; exactly 0 where the target is ignored."""
    if live == de.shape[0]:
        de.copy_(accumulator)
        return
    de.zero_()
    for i0, i1 in _steps(0, live, ROWS):
        de[rows[i0:i1].long()] = accumulator[i0:i1].to(de.dtype)


def exponentials(problem, count, panel, coefficients, scaled):
    """Fill the panel [N, >= V] with factors such that dz = factors[:, None] * panel. Returns nll, lse and factors, [N],
    and None: there is nothing to be done again more cheaply.

    With g = (nll + rest) of the loss's gradients by row, panel = exp(z - m) away from the target, and the factor g / s.
    As in the Triton backend |g| is taken to be at least 2^-24 |nll|. Where `scaled` is given, it becomes
    factors[:, None] * e.
    """
    n, x = problem.e.shape[0], panel[:, : problem.c.shape[0]].t()
    m, s, z_y = x.new_empty((3, n))
    for i0, i1 in _steps(0, n, ROWS):
        part = replace(problem, e=problem.e[i0:i1], targets=problem.targets[i0:i1])
        m[i0:i1], s[i0:i1], z_y[i0:i1] = _exponentials(part, x[:, i0:i1])
    ahead = m - z_y
    gain = torch.exp(-ahead)
    nll = torch.where(ahead < 40, torch.log1p(s * torch.exp(ahead)), ahead + torch.log(s + gain))
    lse = m + torch.log(s + gain)
    upstream, x_y, slope = coefficients.gradients(problem, lse), -s, _slope(problem, z_y)
    g = upstream.nll
    if upstream.rest is not None:
        g, least = g + upstream.rest, g.abs() * 2.0**-24
        g = torch.where(g.abs() < least, least, g)
        x_y = (upstream.rest * gain - upstream.nll * s) / torch.where(g == 0, 1.0, g)
    x[problem.targets.long(), torch.arange(n, device=x.device)] = x_y if slope is None else x_y * slope
    factors = g * (problem.scale / problem.temperature) / (s + gain)
    if scaled is not None:
        torch.mul(problem.e, factors.unsqueeze(1), out=scaled)
    return nll, lse, factors, None


def _exponentials(problem, x):
    """x [V, N] = exp(z - m) * slope, not yet right at the targets. Returns m, the sum of the others, z_y."""
    v, n = x.shape
    at = (problem.targets.long(), torch.arange(n, device=x.device))
    m = x.new_full((n,), -torch.inf)
    for v0, v1 in _steps(0, v, COLUMNS):
        m = torch.maximum(m, _logits(problem, v0, v1, x[v0:v1]).amax(0))
    z_y = x[at]
    x[at] = -torch.inf
    s, base = torch.zeros_like(m), torch.where(m == -torch.inf, 0.0, m)
    for v0, v1 in _steps(0, v, COLUMNS):
        for k0, k1 in _slices(problem, x[v0:v1]):
            s += _exponential(problem, x[v0 + k0 : v0 + k1], base)
    return m, s, z_y


def _exponential(problem, z, base):
    """z becomes exp(z - base) * slope. Returns the sum of the exponentials."""
    slope = _slope(problem, z)
    s = z.sub_(base).exp_().sum(0)
    if slope is not None:
        z *= slope
    return s


def expand_block(accumulator, rows, count, first, factors, de, less=None):
    """dE[rows[first + i]] = accumulator[i] * factors[i] - less[0][i] * less[1], rounded once, in the accumulator."""
    index = rows[first : first + accumulator.shape[0]].long()
    accumulator.mul_(factors.unsqueeze(1))
    if less is not None:
        accumulator.addcmul_(less[0].unsqueeze(1), less[1], value=-1.0)
    de.index_copy_(0, index, accumulator.to(de.dtype))


def write_rows(total, out, less=None):
    """out[i] = total[i] - less[0][i] * less[1], in fp32 and rounded once; onto itself too."""
    for i0, i1 in _steps(0, total.shape[0], COLUMNS // 2):
        rows = total[i0:i1]
        if less is not None:
            rows = torch.addcmul(rows, less[0][i0:i1].unsqueeze(1), less[1], value=-1.0)
        out[i0:i1] = rows.to(out.dtype)


def scale(upstream, de, dc, dbias):
    """Multiply gradients, or None, by a 0-d upstream gradient, in place. One of 0, as of an ignored row, stays 0."""
    factor = float(upstream)
    if factor == 1.0:
        return
    for gradient in (g for g in (de, dc, dbias) if g is not None):
        zero = None if math.isfinite(factor) else gradient == 0
        gradient.mul_(factor)
        if zero is not None:
            gradient.masked_fill_(zero, 0.0)
