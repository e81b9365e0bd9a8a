#!/usr/bin/env python3
"""Train a byte-level language model, quantize its weights by rounding, by GPTQ and by training, and compare.

    pip install 'onnxq[cpu,torch]'
    python examples/qat_language_model/run.py      # some minutes on two cores; --quick: one, without figures

Every row is an exported ONNX file, run by ONNX Runtime on text that nothing was trained on.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import onnxq
from net import ByteModel, compute_loss
from onnxq import qat
from onnxq.runtime import Session
from text import draw_windows, read_sources
from torch_frontend.export import export_onnx
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


class Way(Enum):
    """How a row comes to its weights: rounded from the float file without data or with it, or trained."""

    NEAREST = "fast"
    GPTQ = "balanced"
    QAT = "trained"


# All weights alike, the scores of bytes too.
BLOCKS = {"extends": "ort-int4-weights", "projection_bits": 4}
CHANNELS = {"extends": "ort-dynamic", "weights": {"bits": 4, "storage": "int4"}}
LEARNED = {"weights": {"quantizer": {"name": "lsq", "init": "observer"}}}
# Data rounded as MatMulNBits does it: symmetric int8 in the blocks of the weights.
ROUNDED_DATA = {"activations": {"quantizer": {"name": "dynamic", "scales": "block"}}}
SIGNED = {"activations": {"scheme": "symmetric", "signed": True}}
TWO_BITS = {"weights": {"bits": 2}, "projection_bits": 2}

METHODS: dict[str, tuple[dict[str, Any], Way]] = {
    "W4A16, nearest": (BLOCKS, Way.NEAREST),
    "W4A16, GPTQ": (BLOCKS, Way.GPTQ),
    "W4A16, QAT": (BLOCKS | {"torch": LEARNED}, Way.QAT),
    "W4A8 in blocks, QAT": (BLOCKS | SIGNED | {"torch": LEARNED | ROUNDED_DATA}, Way.QAT),
    "W4A8 dynamic, GPTQ": (CHANNELS, Way.GPTQ),
    "W4A8 dynamic, QAT": (CHANNELS | {"torch": LEARNED}, Way.QAT),
    "W2A16, GPTQ": (BLOCKS | TWO_BITS, Way.GPTQ),
    "W2A16, QAT": (BLOCKS | TWO_BITS | {"torch": LEARNED}, Way.QAT),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, sizes: Sizes, steps: int) -> nn.Module:
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
    return train(net, torch.optim.AdamW(net.parameters(), rate, weight_decay=DECAY), text, sizes, steps)


def train_quantized(net: nn.Module, config: dict[str, Any], text: Tensor, sizes: Sizes) -> QuantModel:
    """Continue in few bits."""
    example = draw_windows(text, sizes.batch, sizes.length, torch.Generator().manual_seed(1))
    model = QuantModel(net, config, example_inputs=example)
    with qat.observing(model):
        model(example)
    model.init_qat()
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=TUNING_RATE, weight_decay=DECAY))
    qat.Pacer(model).attach(optimizer)
    train(model, optimizer, text, sizes, sizes.tuning)
    return model.freeze()


@dataclass(frozen=True)
class Score:
    """bits a byte of text, as the file says and as ONNX Runtime runs it; bytes of the file; processor seconds."""

    said: float
    ran: float
    size: int
    seconds: float


def measure(file: Path, windows: Tensor, start: float) -> Score:
    """Run a file over the windows. start: process time when its making began."""
    seconds, bits = time.process_time() - start, []
    for optimize in (False, True):
        session = Session(file, optimize=optimize)
        logits = np.concatenate([session.run({"ids": part.numpy()})["logits"] for part in windows.split(16)])
        bits.append(float(compute_loss(torch.from_numpy(logits), windows)) / math.log(2))
    return Score(*bits, file.stat().st_size, seconds)


def export_float(net: nn.Module, file: Path, example: Tensor) -> Path:
    """Write a float model."""
    torch.onnx.export(
        net, (example,), file, dynamo=True, external_data=False, verbose=False, opset_version=21,
        input_names=["ids"], output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    return file


def round_file(plain: Path, config: dict[str, Any], way: Way, samples: Tensor) -> onnx.ModelProto:
    """Quantize a float file by onnxq alone. samples: ids [N, T] for rounding that looks at data."""
    asked = {f"weights.{key}": value for key, value in config.get("weights", {}).items()}
    data = {"ids": samples.numpy()} if way is Way.GPTQ else None
    return onnxq.quantize(plain, data, config["extends"], overrides={**asked, "effort": way.value}).model


def run(folder: Path, sizes: Sizes, methods: Mapping[str, tuple[dict[str, Any], Way]]) -> dict[str, Score]:
    """All rows, by their names. What is rounded from a file was trained in float as long as the others in few bits."""
    torch.manual_seed(0)
    text, unseen = read_sources(sizes.text)
    windows = draw_windows(unseen, sizes.test, sizes.length, torch.Generator().manual_seed(2))
    samples, example = draw_windows(text, 64, sizes.length, torch.Generator().manual_seed(3)), windows[:2]
    start = time.process_time()
    net = train_float(ByteModel(layers=sizes.layers, longest=sizes.length), text, sizes, sizes.steps, RATE)
    scores = {"float": measure(export_float(net, folder / "float.onnx", example), windows, start)}
    start = time.process_time()
    further = train_float(copy.deepcopy(net), text, sizes, sizes.tuning, TUNING_RATE)
    plain = export_float(further, folder / "float-further.onnx", example)
    scores["float, trained further"] = measure(plain, windows, start)
    for name, (config, way) in methods.items():
        start, file = time.process_time(), folder / f"{name.replace(', ', '-').replace(' ', '-')}.onnx"
        if way is Way.QAT:
            model = train_quantized(copy.deepcopy(net), config, text, sizes)
            names = {"input_names": ["ids"], "output_names": ["logits"]}
            export_onnx(model, file, example, overwrite=True, dynamic_batch=True, **names)
        else:
            onnx.save(round_file(plain, config, way, samples), file)
        scores[name] = measure(file, windows, start)
    return scores


def print_table(scores: Mapping[str, Score]) -> None:
    """The table in the README."""
    print("\n| | bits a byte, as the file says | as ONNX Runtime runs it | MB | processor s |")
    print("|---|---:|---:|---:|---:|")
    for name, score in scores.items():
        print(f"| {name} | {score.said:.3f} | {score.ran:.3f} | {score.size / 1e6:.2f} | {score.seconds:.0f} |")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one minute, figures without meaning")
    parser.add_argument("--out", type=Path, default=Path("qat_language_model_out"), help="folder for the files")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print_table(run(given.out, QUICK if given.quick else Sizes(), METHODS))


if __name__ == "__main__":
    main()
