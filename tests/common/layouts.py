"""The same values in other layouts: each function returns a tensor equal to its argument."""

import torch

FILLER = 77


def contiguous(t):
    return t


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def strided(t):
    """Every other element of the last dimension."""
    return torch.stack([t, torch.full_like(t, FILLER)], dim=-1)[..., 0]


def offset(t):
    """Not at the start of its storage, and so perhaps not aligned."""
    return torch.cat([t.new_full((1,), FILLER), t.reshape(-1)])[1:].view(t.shape)


def row_padded(t):
    """Rows longer than what is read of them."""
    return torch.cat([t, torch.full_like(t, FILLER)], dim=-1)[..., : t.shape[-1]]


LAYOUTS = (contiguous, transposed, strided, offset, row_padded)
