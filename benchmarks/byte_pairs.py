"""A small language model and what it learns: a causal transformer over pairs of bytes.

A token is 256 b0 + b1, so the vocabulary has 65536 classes and needs no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXTS = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Settings:
    steps: int = 200
    batch: int = 32  # sequences per step
    length: int = 256  # tokens per sequence
    vocabulary: int = 1 << 16
    dim: int = 512
    layers: int = 4
    heads: int = 8
    lr: float = 5e-4
    warmup: int = 20  # steps until the learning rate is lr
    clip: float = 1.0  # largest norm of all gradients together

    @property
    def tokens(self) -> int:
        """Targets per step."""
        return self.batch * self.length


TINY = Settings(steps=20, batch=8, length=16, vocabulary=1024, dim=32, layers=1, heads=2, lr=5e-3, warmup=4)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):  # [B, T, D]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, D / heads]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Gives hidden states; the head's weight is for the loss to multiply by."""

    def __init__(self, settings: Settings):
        super().__init__()
        dim = settings.dim
        self.token, self.position = nn.Embedding(settings.vocabulary, dim), nn.Embedding(settings.length, dim)
        self.blocks = nn.ModuleList(Block(dim, settings.heads) for _ in range(settings.layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, settings.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):  # [B, T]
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # [B, T, D]


def batches(settings: Settings) -> Tensor:
    """[steps, batch, length + 1] token ids: windows that begin at any byte of examples/*.txt."""
    text = bytearray(b"".join(path.read_bytes() for path in sorted(TEXTS.glob("*.txt"))))
    text = torch.frombuffer(text, dtype=torch.uint8).long()
    pairs = (256 * text[:-1] + text[1:]) % settings.vocabulary
    window = torch.arange(0, 2 * (settings.length + 1), 2)
    shape, generator = (settings.steps, settings.batch, 1), torch.Generator().manual_seed(0)
    return pairs[torch.randint(len(pairs) - int(window[-1]), shape, generator=generator) + window]
