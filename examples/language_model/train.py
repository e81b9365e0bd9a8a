#!/usr/bin/env python3
"""Train a byte-level decoder of six million weights on the text that every Python brings along.

    pip install "onnxq[cpu,torch]"        # torch 2.9 or later, for its Muon
    python examples/language_model/train.py --minutes 40      # --quick: seconds, a model without meaning

Writes the folder language_model_out (--out): model.pt every two minutes, and train.txt and test.txt.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from net import ByteDecoder, Shape, compute_loss
from text import read_library

# Of Muon for matrices and of AdamW for the others, at the peak. They rise in the first 2 % and fall to 0 by the end.
MATRIX_RATE, OTHER_RATE, RISE = 0.02, 3e-3, 0.02
# Seconds between two checkpoints.
SAVE_EVERY = 120
QUICK = Shape(width=64, layers=2, heads=2, kept=1, hidden=128)


def draw_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows [count, length] of int64."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()


def make_optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for matrices in the layers, AdamW for the others."""
    matrices = [
        value for name, value in net.named_parameters() if value.ndim == 2 and "embed" not in name
    ]
    chosen = {id(value) for value in matrices}
    others = [value for value in net.parameters() if id(value) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def measure_bits(net: nn.Module, text: Tensor, length: int, windows: int = 64) -> float:
    """Bits a byte on windows spread evenly over a text."""
    starts = torch.linspace(0, len(text) - length, windows).long()
    ids = text[starts[:, None] + torch.arange(length)].long()
    with torch.no_grad():
        losses = [float(compute_loss(net(part)[0], part)) for part in ids.split(8)]
    return sum(losses) / len(losses) / math.log(2)


def save_checkpoint(net: ByteDecoder, file: Path, **notes: float) -> None:
    """Write weights and shape; never half a file."""
    torch.save(
        {"shape": asdict(net.shape), "weights": net.state_dict(), **notes},
        file.with_suffix(".part"),
    )
    file.with_suffix(".part").replace(file)


def train(
    net: ByteDecoder,
    texts: tuple[Tensor, Tensor],
    seconds: float,
    file: Path,
    batch: int,
    length: int,
) -> None:
    """Train for some seconds; the rates follow the time spent, so that the end is reached on slow machines too."""
    generator, start, saved = torch.Generator().manual_seed(0), time.monotonic(), 0.0
    optimizers, step, mean = make_optimizers(net), 0, 0.0
    while (spent := time.monotonic() - start) < seconds:
        pace = min(spent / seconds / RISE, 1.0) * (1 - spent / seconds)
        ids = draw_windows(texts[0], batch, length, generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_loss(net(ids)[0], ids)
        loss.backward()
        for optimizer, rate in zip(optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * pace
            optimizer.step()
            optimizer.zero_grad()
        step, mean = (
            step + 1,
            mean + (float(loss.detach()) / math.log(2) - mean) / min(step + 1, 50),
        )
        if spent - saved > SAVE_EVERY:
            saved = spent
            save_checkpoint(net, file, steps=step)
            print(f"{spent:.0f} s, step {step}: {mean:.3f} bits a byte, "
                  f"unseen {measure_bits(net, texts[1], length):.3f}", flush=True)  # fmt: skip
    save_checkpoint(net, file, steps=step)
    print(
        f"{step} steps of {batch * length} bytes: unseen {measure_bits(net, texts[1], length, 512):.3f} bits a byte"
    )


def main() -> None:
    """Read the text, train, write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--quick", action="store_true", help="a tiny model, some seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("language_model_out"), help="folder for the files"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    parts = read_library()
    (given.out / "test.txt").write_bytes(parts[1])
    (given.out / "train.txt").write_bytes(parts[0])
    training, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    net, seconds = (
        ByteDecoder(QUICK if given.quick else Shape()),
        5.0 if given.quick else given.minutes * 60,
    )
    train(net, (training, test), seconds, given.out / "model.pt", batch=8, length=256)


if __name__ == "__main__":
    main()
