"""Hidden states, a classifier and targets as a trained language model has them.

A logit is  z_ij = log P(j) + noise_ij + gain_i [j = y_i]  with

* P: a Zipf-Mandelbrot prior over ids (tokenizers number frequent tokens low), carried by one direction u of the
  hidden space:  e has component beta along u,  c_j has  (log P(j) - mean) / beta;
* noise: the rest of c is Gaussian, so is the rest of e, and their product has standard deviation `NOISE`;
* gain: along the Gaussian part of c[y_i], chosen so that the log-odds of the target are normal around `ODDS_MEAN`.

The loss of a token is softplus(-log-odds): a quarter of the tokens below 0.3, a tail above 8, mean 2.4 to 3.1
wherever D is a few hundred or more (below that, the rows of c are far from orthogonal).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

NOISE = 1.5  # standard deviation of a logit around its prior, nats
ODDS_MEAN, ODDS_STD = -1.25, 3.8  # log-odds of the target before the noise, nats
ODDS_RANGE = (-11.0, 14.0)
ROW_NORM = 1.28  # |c_j| without the prior: 0.02 per coordinate at D = 4096
BETA = 20.0  # component of e along the prior's direction
CHUNK = 8192  # rows made at a time: the fp32 temporaries stay small


class States(NamedTuple):
    e: torch.Tensor  # [N, D]
    c: torch.Tensor  # [V, D]
    targets: torch.Tensor  # [N], int64
    bias: torch.Tensor  # [V]


def log_prior(v: int, device) -> torch.Tensor:
    """log P(j), [V] float32: P(j) proportional to 1 / (j + 2.7)."""
    rank = torch.arange(v, device=device, dtype=torch.float64)
    return torch.log_softmax(-torch.log(rank + 2.7), 0).float()


def slices(rows: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, rows, CHUNK)]


def make(
    n: int,
    v: int,
    d: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    *,
    ignored: float = 0.01,
    ignore_index: int = -100,
    seed: int = 0,
) -> States:
    """States of n tokens, v ids, d dimensions; a share `ignored` of the targets, scattered, is `ignore_index`.

    The bias is small noise: it belongs to the states but only callers that ask for a bias pass it on.
    """
    rng = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    prior = log_prior(v, device)
    cdf = prior.double().exp().cumsum(0)
    targets = torch.searchsorted(cdf, torch.rand(n, generator=rng, device=device, dtype=torch.float64) * cdf[-1])
    targets.clamp_(max=v - 1)

    u = torch.sign(normal(d)) / math.sqrt(d)
    weight = (prior - prior.mean()) / BETA  # [V], component of c_j along u
    c = torch.empty(v, d, dtype=dtype, device=device)
    for rows in slices(v):
        c[rows] = normal(*c[rows].shape) * (ROW_NORM / math.sqrt(d)) + weight[rows, None] * u

    odds = (ODDS_MEAN + ODDS_STD * normal(n)).clamp_(*ODDS_RANGE)
    gain = odds - prior[targets] + NOISE**2 / 2  # the background's lse is mean(prior) shifted, plus NOISE^2 / 2
    e = torch.empty(n, d, dtype=dtype, device=device)
    for rows in slices(n):
        ids = targets[rows]
        direction = c[ids].float() - weight[ids, None] * u
        direction /= direction.square().sum(-1, keepdim=True).clamp_min_(1e-6)
        e[rows] = normal(*e[rows].shape) * (NOISE / ROW_NORM) + BETA * u + gain[rows, None] * direction

    bias = (0.5 * normal(v)).to(dtype)
    if ignored >= 1:
        targets.fill_(ignore_index)
    elif ignored > 0:
        targets[torch.rand(n, generator=rng, device=device) < ignored] = ignore_index
    return States(e, c, targets, bias)
