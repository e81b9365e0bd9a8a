"""Text that every Python brings along: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def read_sources(limit: int) -> tuple[Tensor, Tensor]:
    """(training, test) bytes as int64: every eighth file is for tests. limit: bytes in all."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for k, file in enumerate(files):
        parts[k % 8 == 7].extend(file.read_bytes())
        if sum(map(len, parts)) > limit:
            break
    training, test = (torch.frombuffer(part, dtype=torch.uint8).long() for part in parts)
    return training, test


def draw_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows [count, length]."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)]
