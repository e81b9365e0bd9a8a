"""A byte-level decoder of Llama's shape: RMSNorm, rotary positions, grouped queries, SwiGLU, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
# Added to the scores of what must not be seen; far below any score, and finite, as exporters write it.
HIDDEN = -1e9

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """width of the stream, layers, heads of queries, heads of keys and values, width of the feed-forward."""

    width: int = 256
    layers: int = 6
    heads: int = 4
    kept: int = 2
    hidden: int = 1024

    @property
    def size(self) -> int:
        """Features a head."""
        return self.width // self.heads


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each half of the features is turned against the other."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Attention to the bytes before, some of which are known by their keys and values alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kept * shape.size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kept * shape.size, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = (
            part.unflatten(-1, (-1, self.shape.size)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key = turn_halves(query, *turns), turn_halves(key, *turns)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        present, groups = (key, value), self.shape.heads // self.shape.kept
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), present


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_norm, self.post_norm = (nn.RMSNorm(shape.width, eps=1e-5) for _ in range(2))
        self.attention = Attention(shape)
        self.gate_proj, self.up_proj = (
            nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, present = self.attention(self.input_norm(x), turns, mask, past)
        x = x + mixed
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), present


class ByteDecoder(nn.Module):
    """Bytes [N, T], and keys and values of P bytes before them -> logits of the next byte [N, T, 256]."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.embed_tokens = nn.Embedding(BYTES, shape.width)
        self.layers = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.register_buffer(
            "rates", 10000 ** (-torch.arange(0, shape.size, 2) / shape.size), persistent=False
        )
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        """Draw the weights; those that end in the stream are smaller, the more layers add to it."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        for layer in module.layers if module is self else ():
            for last in (layer.attention.o_proj, layer.down_proj):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.shape.layers) ** 0.5)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """(logits, keys and values [N, kept, P + T, size] of each layer). attention_mask: int64 [N, P + T]."""
        length, known = input_ids.shape[1], past_key_values[0][0].shape[2] if past_key_values else 0
        if position_ids is None:
            position_ids = torch.arange(known, known + length)[None]
        angles = (position_ids[..., None].float() * self.rates)[:, None].repeat(1, 1, 1, 2)
        turns, mask = (angles.cos(), angles.sin()), None
        if attention_mask is not None:
            later = (
                torch.arange(known + length)[None] > torch.arange(known, known + length)[:, None]
            )
            mask = (later | (attention_mask[:, None, None] == 0)).float() * HIDDEN
        x, presents = self.embed_tokens(input_ids), []
        for k, layer in enumerate(self.layers):
            x, present = layer(x, turns, mask, past_key_values[k] if past_key_values else None)
            presents.append(present)
        return F.linear(self.norm(x), self.embed_tokens.weight), presents


def compute_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of each byte after the ones before, in nats."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
