"""A byte-level language model of Llama's shape: RMSNorm, rotary positions, grouped queries, a gated feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class Attention(nn.Module):
    """Causal attention; several queries share a key and value."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.kept, self.size = heads, heads // shared, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, self.kept * self.size, bias=False)
        self.value = nn.Linear(width, self.kept * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        query, key = turn(query, cos, sin), turn(key, cos, sin)
        key, value = (part.repeat_interleave(self.heads // self.kept, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each half of the features is turned against the other."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, shared)
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ByteModel(nn.Module):
    """Bytes [N, T] -> logits of the next byte [N, T, 256]."""

    def __init__(
        self, width: int = 128, layers: int = 3, hidden: int = 384, longest: int = 128
    ) -> None:
        super().__init__()
        heads, shared = 4, 2
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList([Block(width, heads, shared, hidden) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, BYTES, bias=False)
        rates = 10000 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(longest), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = (table.narrow(0, 0, ids.shape[1]) for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def compute_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of each byte after the ones before, in nats."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
