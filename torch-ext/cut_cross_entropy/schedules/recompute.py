"""Schedule `recompute`: fold the logits in the forward, rebuild them panel by panel in the backward.

8 N V D floating-point operations for the loss and both gradients; scratch: one panel and an fp32 accumulator for dE.
Where the budget has room, the forward keeps the exponentials of the first classes, as `single_pass` stores them, and
the backward need not rebuild those: down to 6 N V D.
"""

import math
from dataclasses import replace

import torch

from ..planner import plan
from ..problem import Gradients, RowGradients
from .smoothing import Smoothing

# Columns that a GEMM extent must be a multiple of to run at full speed.
ALIGNED = 8


def forward(backend, problem, want_smooth=False, want_entropy=False, want_prediction=False, *, keep=0, counted=False):
    """Per row: lse = m + log s over all classes and the target's logit from the same accumulators.

    The exponentials of the first `keep` classes are kept for the backward. Where that is to have the count of valid
    rows, `counted`, it is on its way to the host while the rows are folded.
    """
    rows, count = backend.select(problem.targets, problem.ignore_index, problem.c.shape[0])
    counting, room = backend.count_later(problem, count) if counted else None, {}
    if keep and backend.reads_count(problem):
        room["panel"] = backend.new_panel(problem.e, problem.e.shape[0], 64 * math.ceil(keep / 64))
    found = backend.fold(problem, rows, count, want_smooth, want_entropy, want_prediction, **room)
    return found._replace(counting=counting)


def planned(backend, e, v, needs, workspace, **rows):
    """The plan for these inputs, or a ValueError where the workspace is below what they need."""
    need_de, need_dc, need_dbias = needs
    return plan(
        *(e.shape[0], v, e.shape[1], e.dtype), device="cuda" if backend.NAME == "triton" else "cpu",
        need_de=need_de, need_dc=need_dc, need_dbias=need_dbias, workspace=workspace, **rows,
    )  # fmt: skip


def row_gradients(problem, nll, lse, smooth, entropy):
    """Gather what multiplies p in one vector: d lse/dz = p, d smooth/dz = (sum w) p - w."""
    rest = lse
    if smooth is not None:
        rest = smooth * problem.total_weight if lse is None else lse + smooth * problem.total_weight
    return RowGradients(nll, rest, smooth, entropy)


def backward(backend, problem, fold, upstream, gradients, workspace):
    """dC[panel] = panel.T @ e, one plain write each; dE = sum over panels of panel @ c[panel], fp32, rounded once."""
    (n, d), v = problem.e.shape, problem.c.shape[0]
    counting = fold.counting
    if counting is None or not backend.reads_count(problem):
        counting = backend.count_later(problem, fold.count)
    live, known = counting.wait(), counting.known
    if live == 0 or d == 0:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return
    de, dc, dbias = gradients
    unit = backend.panel_unit(problem, upstream)
    kept = 0 if fold.kept is None else min(fold.kept.shape[1], v)
    rows = {} if kept else dict(valid=live, compacted=not known or live < n)
    width = planned(backend, problem.e, v, gradients.wanted, workspace, kept=kept, **rows).panel
    if kept and not (known and backend.folds_all_rows(live, n)):
        kept = 0
    if kept:
        e, fold, upstream = every_row(problem, fold, upstream, live, de)
        live = n
    else:
        e = backend.compact(problem.e, fold.rows, fold.count, live, known, de)
    accumulator = de
    if de is not None and (de.dtype != torch.float32 or e is not problem.e):
        accumulator = torch.empty((live, d), dtype=torch.float32, device=de.device)

    def contract(panel, e, v0, v1, bias=dbias, row=None):
        for a, b in aligned_pieces(v0, v1):
            piece = panel[:, a - v0 : b - v0]
            backend.contract_c(piece, e, *Gradients(None, dc, bias).columns(a, b), unit, row)
            if de is not None:
                backend.accumulate(piece, problem.c[a:b], accumulator, first=a == 0)

    if kept:
        smoothing = None
        if upstream.smooth is not None:
            smoothing = Smoothing(backend, problem, upstream.smooth.contiguous(), kept)
            smoothing.add(e, 0, live)
        scaled = None if dc is None else torch.empty_like(e)
        multiples = upstream._replace(smooth=None)
        factors = backend.factors(replace(problem, e=e), fold, multiples, fold.kept, scaled)
        row = smoothing and smoothing.of_every_class()
        contract(fold.kept, scaled, 0, kept, bias=None, row=row)
        if dbias is not None:
            total = backend.column_sum(fold.kept[:, :kept], factors)
            dbias[:kept].copy_(total - smoothing.of_bias() if smoothing else total)
        if dc is not None and smoothing and row is None:
            backend.write_rows(dc[:kept], dc[:kept], less=smoothing.of_classes())
        if de is not None:
            backend.scale_rows(accumulator, factors, less=smoothing and smoothing.of_rows(0, live))
    if kept < v:
        # A panel that was kept in vain, since the fold ran over the list of valid rows, is as good as a new one.
        panel = backend.new_panel(problem.e, live, width) if kept or fold.kept is None else fold.kept[:live]
        write_dlogits = backend.dlogits(problem, e, fold, upstream, live, unit, panel)
        for v0 in range(kept, v, panel.shape[1]):
            v1 = min(v0 + panel.shape[1], v)
            write_dlogits(v0, v1)
            contract(panel, e, v0, v1)
    if accumulator is not de:
        backend.expand(accumulator, fold.rows, fold.count, live, known, unit, de)


def every_row(problem, fold, upstream, live, de):
    """e, fold and upstream over all rows, in which those of ignored targets, whatever they held, are zero."""
    e, kept, n = problem.e, fold.kept, problem.e.shape[0]
    nll = fold.nll.new_zeros(1).expand(n) if upstream.nll is None else upstream.nll
    upstream = upstream._replace(nll=nll)
    if live < n:
        valid = problem.targets != problem.ignore_index
        upstream = RowGradients(*(None if g is None else torch.where(valid, g, 0.0) for g in upstream))
        e = torch.where(valid[:, None], e, e.new_zeros(()), out=torch.empty_like(e) if de is None else de)
        # Through .data: to autograd a second backward finds what was saved.
        kept.data.index_fill_(0, torch.nonzero_static(~valid, size=n - live).squeeze(1), 0.0)
    rows = torch.arange(n, dtype=torch.int32, device=e.device)
    return e, fold._replace(rows=rows, count=torch.full_like(fold.count, n)), upstream


def aligned_pieces(v0, v1):
    """A GEMM over an odd extent runs several times slower: the last V mod 8 columns are one of their own."""
    cut = v1 - (v1 - v0) % ALIGNED
    return [(a, b) for a, b in ((v0, cut), (cut, v1)) if a < b]
