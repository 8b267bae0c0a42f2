"""Schedule `recompute`: fold the logits in the forward, rebuild them panel by panel in the backward.

8 N V D floating-point operations for the loss and both gradients; scratch: one panel and an fp32 accumulator for dE.
"""

import torch

from ..planner import plan
from ..problem import RowGradients

# Columns that a GEMM extent must be a multiple of to run at full speed.
ALIGNED = 8


def forward(backend, problem, *, want_smooth=False, want_entropy=False, want_prediction=False):
    """Per row: lse = m + log s over all classes and the target's logit from the same accumulators."""
    rows, count = backend.select(problem.targets, problem.ignore_index, problem.c.shape[0])
    return backend.fold(problem, rows, count, want_smooth, want_entropy, want_prediction)


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
    live, known = backend.count_on_host(problem, fold.count) if n else (0, True)
    if live == 0 or d == 0:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return
    compacted = not known or live < n
    chosen = planned(backend, problem.e, v, gradients.wanted, workspace, valid=live, compacted=compacted)
    unit = backend.panel_unit(problem, upstream)
    de = gradients.de
    e = backend.compact(problem.e, fold.rows, fold.count, live, known, de)
    accumulator = de
    if de is not None and (de.dtype != torch.float32 or e is not problem.e):
        accumulator = torch.empty((live, d), dtype=torch.float32, device=de.device)
    panel = backend.new_panel(problem.e, live, chosen.panel)
    write_dlogits = backend.dlogits(problem, e, fold, upstream, live, unit, panel)
    for v0 in range(0, v, chosen.panel):
        v1 = min(v0 + chosen.panel, v)
        write_dlogits(v0, v1)
        for a, b in aligned_pieces(v0, v1):
            piece = panel[:, a - v0 : b - v0]
            backend.contract_c(piece, e, *gradients.columns(a, b), unit)
            if de is not None:
                backend.accumulate(piece, problem.c[a:b], accumulator, first=a == 0)
    if accumulator is not de:
        backend.expand(accumulator, fold.rows, fold.count, live, known, unit, de)


def aligned_pieces(v0, v1):
    """A GEMM over an odd extent runs several times slower: the last V mod 8 columns are one of their own."""
    cut = v1 - (v1 - v0) % ALIGNED
    return [(a, b) for a, b in ((v0, cut), (cut, v1)) if a < b]
