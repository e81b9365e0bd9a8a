"""A Llama-shaped decoder in torch, tied embeddings and all, and the training that made `weights.npz`.

python tests/decoders/net.py
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.decoders.sizes import SIZES, WEIGHTS, Sizes
from tests.decoders.text import encode_text

# (key, value) of each layer, of shape [batch, key heads, length, head size].
Caches = list[tuple[Tensor, Tensor]]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        keys = sizes.key_heads * sizes.head
        self.input_norm, self.post_norm = Norm(width), Norm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, sizes.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor]) -> tuple:
        normed = self.input_norm(x)
        query, key, value = (
            proj(normed).unflatten(-1, (-1, self.sizes.head)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *turn), rotate(key, *turn)
        key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        groups = self.sizes.heads // self.sizes.key_heads
        wide = [one.repeat_interleave(groups, dim=1) for one in (key, value)]
        mixed = F.scaled_dot_product_attention(query, *wide, attn_mask=mask)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed)), key, value


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes = SIZES) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        steps = torch.arange(0, sizes.head, 2) / sizes.head
        self.register_buffer("frequencies", 1.0 / sizes.theta**steps, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Caches) -> tuple:
        """Logits, then the key and value of each layer."""
        x = self.embed(input_ids)
        angles = position_ids[..., None].float() * self.frequencies
        turn = tuple(torch.cat((one, one), dim=-1)[:, None] for one in (angles.cos(), angles.sin()))
        at = torch.arange(attention_mask.shape[1], device=x.device)
        seen = (at <= position_ids[..., None]) & attention_mask[:, None].bool()
        mask = torch.where(seen[:, None], 0.0, torch.finfo(x.dtype).min)
        presents: list[Tensor] = []
        for layer, held in zip(self.layers, past, strict=True):
            x, *made = layer(x, mask, turn, held)
            presents += made
        return F.linear(self.norm(x), self.embed.weight), *presents

    def make_caches(self, batch: int = 1) -> Caches:
        empty = torch.zeros(batch, self.sizes.key_heads, 0, self.sizes.head)
        return [(empty, empty) for _ in self.layers]


def train(steps: int = 1500, length: int = 112, batch: int = 6) -> Decoder:
    torch.manual_seed(0)
    net, text = Decoder(), torch.from_numpy(encode_text())[0]
    nn.init.normal_(net.embed.weight, std=0.3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    mask, positions, caches = torch.ones(batch, length), torch.arange(length)[None], net.make_caches(batch)
    for step in range(steps):
        starts = torch.randint(0, len(text) - length, (batch,))
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        logits = net(rows[:, :-1], mask, positions.expand(batch, -1), caches)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), label_smoothing=0.02)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, float(loss.detach()), flush=True)
    return net


if __name__ == "__main__":
    state = train().state_dict()
    np.savez_compressed(Path(WEIGHTS), **{name: value.half().numpy() for name, value in state.items()})
