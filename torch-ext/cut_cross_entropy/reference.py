"""The definition, materialized: forms the [N, V] logits and leaves the derivatives to autograd.

Every test compares with this file, so it imports nothing of the package and takes no shortcut. With `dtype=float64`
(the default) it is the truth for the same 16-bit inputs. Over the valid rows i, those whose target is not
`ignore_index`, with V' the number of real classes, tw the token weights and w the class weights:

    z    = softcap * tanh((e @ c.T + bias) * logit_scale / softcap) / temperature
    CE_i = (1 - eps) * w_y * (lse_i - z_y) + eps / V' * sum_c w_c * (lse_i - z_c)

    none   tw_i * (CE_i + z_loss * lse_i^2)
    sum    the sum of these
    mean   sum tw * CE / (num_items or sum tw * w_y)  +  z_loss * sum tw * lse^2 / (num_items or sum tw)

Ignored rows are taken out before any arithmetic and come back as 0; a mean over a zero divisor is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenStats(NamedTuple):
    """Per-token results in the shape of targets; ignored rows hold 0, 0, 0, -1 and False."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    prediction: Tensor
    correct: Tensor


def linear_cross_entropy(
    e,  # [..., D]
    c,  # [V, D]
    targets,  # [...]
    bias=None,  # [V]
    ignore_index=-100,
    softcap=None,
    reduction="mean",
    shift=False,
    *,
    logit_scale=1.0,
    return_lse=False,
    weight=None,  # [V]
    label_smoothing=0.0,
    z_loss=0.0,
    token_weight=None,  # [...]
    num_items=None,
    temperature=1.0,
    vocab_size=None,
    dtype=torch.float64,
):
    """The loss in `dtype` (a scalar, or the shape of targets for reduction="none"), and the lse if asked for."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if shift:
        e, targets = e[..., :-1, :], targets[..., 1:]
        token_weight = None if token_weight is None else token_weight[..., 1:]
    valid = targets != ignore_index
    z, y = _logits(e, c, targets, bias, valid, softcap, logit_scale, temperature, vocab_size, dtype)

    tw = torch.ones_like(y, dtype=dtype) if token_weight is None else token_weight[valid].to(dtype)
    w = torch.ones(z.shape[1], dtype=dtype, device=z.device) if weight is None else weight[: z.shape[1]].to(dtype)
    lse = z.logsumexp(1)
    ce = (1 - label_smoothing) * w[y] * (lse - _at(z, y))
    if label_smoothing:
        ce = ce + label_smoothing * (w * (lse[:, None] - z)).mean(1)
    penalty = z_loss * lse.square() if z_loss else torch.zeros_like(lse)

    if reduction == "none":
        loss = _scatter(tw * (ce + penalty), valid)
    elif reduction == "sum":
        loss = (tw * (ce + penalty)).sum()
    else:
        loss = _mean(tw * ce, (tw * w[y]).sum() if num_items is None else num_items)
        loss = loss + _mean(tw * penalty, tw.sum() if num_items is None else num_items)
    return (loss, _scatter(lse, valid)) if return_lse else loss


def linear_token_stats(
    e,  # [..., D]
    c,  # [V, D]
    targets,  # [...]
    bias=None,  # [V]
    ignore_index=-100,
    softcap=None,
    shift=False,
    *,
    logit_scale=1.0,
    temperature=1.0,
    vocab_size=None,
    dtype=torch.float64,
):
    """Log-probability of the target, lse, entropy, most probable id (the lowest of equals), and whether it is right.

    entropy = lse - sum_c p_c * z_c, where a logit of -inf counts as 0.
    """
    if shift:
        e, targets = e[..., :-1, :], targets[..., 1:]
    valid = targets != ignore_index
    z, y = _logits(e, c, targets, bias, valid, softcap, logit_scale, temperature, vocab_size, dtype)

    lse = z.logsumexp(1)
    finite = torch.where(z == float("-inf"), 0, z)
    entropy = lse - ((z - lse[:, None]).exp() * finite).sum(1)
    prediction = z.argmax(1) if len(y) else y
    return TokenStats(
        logprob=_scatter(_at(z, y) - lse, valid),
        lse=_scatter(lse, valid),
        entropy=_scatter(entropy, valid),
        prediction=_scatter(prediction, valid, fill=-1),
        correct=_scatter(prediction == y, valid, fill=False),
    )


def _logits(e, c, targets, bias, valid, softcap, logit_scale, temperature, vocab_size, dtype):
    """z [n, V'] and y [n] of the n valid rows."""
    classes = c.shape[0] if vocab_size is None else vocab_size
    y = targets[valid].long()
    wrong = y[(y < 0) | (y >= classes)]
    if len(wrong):
        raise IndexError(f"target {wrong[0]} is not in [0, {classes})")
    z = e[valid].to(dtype) @ c[:classes].to(dtype).T
    if bias is not None:
        z = z + bias[:classes].to(dtype)
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature, y


def _at(z, y):
    """z[i, y_i] of every row i."""
    return z.gather(1, y[:, None])[:, 0]


def _scatter(rows, valid, fill=0):
    """rows [n] back at the True places of `valid`, `fill` elsewhere."""
    return torch.full_like(valid, fill, dtype=rows.dtype).masked_scatter(valid, rows)


def _mean(rows, divisor):
    """sum(rows) / divisor, 0 where the divisor is 0."""
    divisor = torch.as_tensor(divisor, dtype=rows.dtype, device=rows.device)
    return torch.where(divisor == 0, 0, rows.sum() / torch.where(divisor == 0, 1, divisor))
