#!/usr/bin/env python3
"""Train a byte-level language model, quantize its weights by rounding, by GPTQ and by training, and compare.

    pip install "onnxq[cpu,torch]"
    python examples/qat_language_model/run.py      # some minutes on two cores; --quick: one, without figures

Every row is an exported ONNX file, run by ONNX Runtime on text that nothing was trained on.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from net import ByteModel, compute_loss
from onnxq import qat
from onnxq.runtime import Session
from rows import Methods, Score, Task, Way, make_rows, observe, print_table, read_arguments
from text import draw_windows, read_sources
from torch_frontend.quant_model import QuantModel

# Of AdamW, in float training and in what follows, in float or quantized.
RATE, TUNING_RATE, DECAY = 3e-3, 3e-4, 0.05


@dataclass(frozen=True)
class Sizes:
    """steps of the first and the second training; windows a batch; bytes a window; windows of the test; bytes read."""

    steps: int = 1600
    tuning: int = 200
    batch: int = 4
    length: int = 128
    test: int = 256
    text: int = 6_000_000
    layers: int = 3


# Half a minute, without figures that mean anything.
QUICK = Sizes(steps=20, tuning=4, batch=4, length=32, test=4, text=300_000, layers=1)


# All weights alike, the scores of bytes too.
BLOCKS = {"extends": "ort-int4-weights", "projection_bits": 4}
CHANNELS = {"extends": "ort-dynamic", "weights": {"bits": 4, "storage": "int4"}}
LEARNED = {"weights": {"quantizer": {"name": "lsq", "init": "observer"}}}
# Data rounded as MatMulNBits does it: symmetric int8 in the blocks of the weights.
ROUNDED_DATA = {"activations": {"quantizer": {"name": "dynamic", "scales": "block"}}}
SIGNED = {"activations": {"scheme": "symmetric", "signed": True}}
TWO_BITS = {"weights": {"bits": 2}, "projection_bits": 2}

METHODS: Methods = {
    "W4A16, nearest": (BLOCKS, Way.NEAREST),
    "W4A16, GPTQ": (BLOCKS, Way.GPTQ),
    "W4A16, QAT": (BLOCKS | {"torch": LEARNED}, Way.QAT),
    "W4A8 in blocks, QAT": (BLOCKS | SIGNED | {"torch": LEARNED | ROUNDED_DATA}, Way.QAT),
    "W4A8 dynamic, GPTQ": (CHANNELS, Way.GPTQ),
    "W4A8 dynamic, QAT": (CHANNELS | {"torch": LEARNED}, Way.QAT),
    "W2A16, GPTQ": (BLOCKS | TWO_BITS, Way.GPTQ),
    "W2A16, QAT": (BLOCKS | TWO_BITS | {"torch": LEARNED}, Way.QAT),
}


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, sizes: Sizes, steps: int
) -> nn.Module:
    """Train one cycle, on batches that depend on the number of steps alone."""
    generator = torch.Generator().manual_seed(steps)
    rates = [group["lr"] for group in optimizer.param_groups]
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids = draw_windows(text, sizes.batch, sizes.length, generator)
        loss = compute_loss(net(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.step()
        if step % 100 == 0:
            print(f"step {step}: {float(loss.detach()) / math.log(2):.3f} bits a byte", flush=True)
    return net.eval()


def train_float(net: nn.Module, text: Tensor, sizes: Sizes, steps: int, rate: float) -> nn.Module:
    """Train in float."""
    return train(
        net, torch.optim.AdamW(net.parameters(), rate, weight_decay=DECAY), text, sizes, steps
    )


def train_quantized(
    net: nn.Module, config: dict[str, Any], text: Tensor, sizes: Sizes
) -> QuantModel:
    """Continue in few bits."""
    ids = draw_windows(text, sizes.batch, sizes.length, torch.Generator().manual_seed(1))
    model = observe(net, config, {"ids": ids})
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=TUNING_RATE, weight_decay=DECAY))
    qat.Pacer(model).attach(optimizer)
    train(model, optimizer, text, sizes, sizes.tuning)
    return model.freeze()


def measure_bits(session: Session, windows: Tensor) -> float:
    """Bits a byte of windows."""
    logits = np.concatenate(
        [session.run({"ids": part.numpy()})["logits"] for part in windows.split(16)]
    )
    return float(compute_loss(torch.from_numpy(logits), windows)) / math.log(2)


def run(folder: Path, sizes: Sizes, methods: Methods) -> dict[str, Score]:
    """All rows, by their names."""
    torch.manual_seed(0)
    text, unseen = read_sources(sizes.text)
    windows = draw_windows(unseen, sizes.test, sizes.length, torch.Generator().manual_seed(2))
    samples = draw_windows(text, 64, sizes.length, torch.Generator().manual_seed(3))

    def train_plain(net: nn.Module, further: bool) -> nn.Module:
        steps, rate = (sizes.tuning, TUNING_RATE) if further else (sizes.steps, RATE)
        return train_float(net, text, sizes, steps, rate)

    task = Task(
        net=ByteModel(layers=sizes.layers, longest=sizes.length),
        train=train_plain,
        train_quantized=lambda net, config: train_quantized(net, config, text, sizes),
        inputs={"ids": windows[:2]},
        # Weights are rounded to nearest without data.
        samples=lambda way: {"ids": samples.numpy()} if way is Way.GPTQ else None,
        measure=lambda session: measure_bits(session, windows),
    )
    return make_rows(task, folder, methods)


def main() -> None:
    """Run everything and print the table."""
    folder, sizes = read_arguments(__doc__, "qat_language_model_out", Sizes(), QUICK)
    heads = ("bits a byte, as the file says", "as ONNX Runtime runs it")
    print_table(run(folder, sizes, METHODS), heads, "{:.3f}".format)


if __name__ == "__main__":
    main()
