"""The definition in float64, a block of rows at a time, so that it fits on the card at the shapes of the benchmarks.

Derivatives are written out rather than left to autograd: with u = (e c^T + bias) * logit_scale,
z = softcap * tanh(u / softcap), p = softmax(z), q = (1 - label_smoothing) onehot + label_smoothing / V and row
coefficients g (upstream of the loss) and h (of the lse),

    dz = (g + h) p - g q,   du = dz (1 - (z / softcap)^2) logit_scale,   dE = du c,   dC = du^T e,   dbias = sum du

Beside them stand the gradients of a kernel whose only errors are one rounding of the panel du and one of each
contraction to the dtype of the inputs: the error that no kernel with a panel of that dtype avoids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK_BYTES = 2 << 30  # of one [rows, V] float64 block; about six are alive at a time
ALIGNED = 64  # columns of the block are padded to this: an odd V makes the GEMM several times slower

# Relative Frobenius error of a gradient against float64, by dtype of the inputs, on the states of the benchmarks.
GRADIENT_BOUND = {torch.bfloat16: 2.9e-3, torch.float16: 5e-4, torch.float32: 1e-5}
LOSS_BOUND = 1e-5  # relative to max(1, |lse|) for a token, to the value for a sum or mean


@dataclass
class Truth:
    """float64 results; `once` holds the once-rounded gradients under the same names, where asked for."""

    loss: torch.Tensor  # [N] per token, 0 where ignored
    lse: torch.Tensor  # [N]
    reduced: torch.Tensor  # by the reduction asked for: [] or [N]
    de: torch.Tensor | None = None  # [N, D]
    dc: torch.Tensor | None = None  # [V, D]
    dbias: torch.Tensor | None = None  # [V]
    once: dict[str, torch.Tensor] | None = None


def round_panel(du: torch.Tensor, dtype: torch.dtype, largest: float) -> torch.Tensor:
    """du as a panel of `dtype` holds it. fp16 panels are scaled by a power of two to stay clear of subnormals."""
    if dtype != torch.float16:
        return du.to(dtype).double()
    scale = 2.0 ** (torch.tensor(largest or 1.0).log2().floor().item() - 10)
    return (du / scale).to(dtype).double() * scale


def truth(
    e: torch.Tensor,  # [..., D]
    c: torch.Tensor,  # [V, D]
    targets: torch.Tensor,  # [...]
    bias: torch.Tensor | None = None,  # [V]
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    *,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    upstream: torch.Tensor | float = 1.0,  # of the loss: a number, or a value per token with reduction="none"
    upstream_lse: torch.Tensor | None = None,  # of the lse, per token
    gradients: bool = True,
    once: bool = False,
) -> Truth:
    """Loss, lse and gradients of the whole batch. With shift, per-token tensors cover the positions [..., T-1]."""
    dtype, device, d, v = e.dtype, e.device, e.shape[-1], c.shape[0]
    kept = targets[..., 1:] if shift else targets
    if shift:
        targets = torch.cat([targets[..., 1:], torch.full_like(targets[..., :1], ignore_index)], -1)
    shape, targets, e = targets.shape, targets.reshape(-1), e.reshape(-1, d)
    n = targets.numel()

    def per_token(x: torch.Tensor | float) -> torch.Tensor:
        x = torch.as_tensor(x, dtype=torch.float64, device=device)
        if x.ndim and shift:
            x = F.pad(x, (0, 1))
        return x.expand(shape).reshape(-1)

    rows = (targets != ignore_index).nonzero().squeeze(1)
    divisor = max(len(rows), 1) if reduction == "mean" else 1
    g = per_token(upstream) / divisor
    h = per_token(0.0 if upstream_lse is None else upstream_lse)
    finite = (g.abs() + h.abs())[rows]
    largest = finite.max().item() if finite.numel() else 1.0

    padded = -(-v // ALIGNED) * ALIGNED
    c64 = F.pad(c.double(), (0, 0, 0, padded - v))
    loss, lse = torch.zeros(2, n, dtype=torch.float64, device=device)
    out = Truth(loss, lse, loss)
    if gradients:
        out.de, out.dc = torch.zeros(n, d, dtype=torch.float64, device=device), torch.zeros_like(c64)
        out.dbias = torch.zeros(padded, dtype=torch.float64, device=device)
    if gradients and once:
        out.once = {name: torch.zeros_like(getattr(out, name)) for name in ("de", "dc", "dbias")}

    for block in rows.split(max(1, CHUNK_BYTES // (8 * padded))):
        e64, y = e[block].double(), targets[block].long()
        z = e64 @ c64.T  # [rows, padded V]
        if bias is not None:
            z[:, :v] += bias.double()
        z *= logit_scale
        slope = logit_scale
        if softcap:
            z = torch.tanh(z / softcap)
            slope = (1 - z.square()) * logit_scale
            z *= softcap
        z[:, v:] = -torch.inf
        lse[block] = torch.logsumexp(z, 1)
        expected = z.gather(1, y[:, None]).squeeze(1)
        if label_smoothing:  # otherwise a logit of -inf counts for nothing
            expected = torch.lerp(expected, z[:, :v].mean(1), label_smoothing)
        loss[block] = lse[block] - expected
        if not gradients:
            continue
        du = z.sub_(lse[block, None]).exp_()
        du *= (g + h)[block, None]
        if label_smoothing:
            du[:, :v] -= label_smoothing / v * g[block, None]
        du[torch.arange(len(block), device=device), y] -= (1 - label_smoothing) * g[block]
        du *= slope
        out.de[block] = du @ c64
        out.dc += du.T @ e64
        out.dbias += du.sum(0)
        if once:
            panel = round_panel(du, dtype, largest)
            out.once["de"][block] = panel @ c64
            out.once["dc"] += panel.T @ e64
            out.once["dbias"] += panel.sum(0)

    keep = [slice(None)] * len(shape)
    if shift:
        keep[-1] = slice(0, kept.shape[-1])
    out.loss, out.lse = (x.reshape(shape)[tuple(keep)] for x in (loss, lse))
    out.reduced = out.loss if reduction == "none" else out.loss.sum() / divisor
    if gradients:
        out.de, out.dc, out.dbias = out.de.reshape(*shape, d), out.dc[:v], out.dbias[:v]
        if once:
            sizes = {"de": (*shape, d), "dc": (padded, d), "dbias": (padded,)}
            out.once = {k: t.reshape(sizes[k]).to(dtype).double() for k, t in out.once.items()}
            out.once |= {k: out.once[k][:v] for k in ("dc", "dbias")}
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, Frobenius norms; |got| where the reference is zero."""
    norm = want.norm().item()
    return (got.double() - want).norm().item() / (norm or 1.0)


def errors(loss: torch.Tensor, de: torch.Tensor, dc: torch.Tensor, exact: Truth) -> dict[str, float]:
    """Relative errors of a scalar loss and its gradients."""
    gradients = {"de": relative_error(de, exact.de), "dc": relative_error(dc, exact.dc)}
    return {"loss": abs(loss.item() / exact.reduced.item() - 1)} | gradients


def gradient_bound(want: torch.Tensor, once: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest allowed |got - want|: the contract of the benchmark states, or twice the once-rounded error plus u."""
    norm = want.norm().item()
    unit_roundoff = torch.finfo(dtype).eps / 2
    return max(GRADIENT_BOUND[dtype] * norm, 2 * (once - want).norm().item() + unit_roundoff * norm)
