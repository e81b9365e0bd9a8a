#!/usr/bin/env python3
"""Train a byte-level language model, quantize its weights to 4 bits by rounding, by GPTQ and by training, and compare.

    pip install 'onnxq[cpu,torch]'
    python examples/qat_language_model/run.py      # some minutes on two cores; --quick: one, without figures

Every row is an exported ONNX file, run by ONNX Runtime on text that nothing was trained on.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from dataclasses import dataclass
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

BLOCK = 32
# Data rounded as MatMulNBits does it: symmetric int8 in the blocks of the weights.
IN_BLOCKS = {"quantizer": {"name": "dynamic", "scales": "block"}}
LEARNED = {"quantizer": {"name": "lsq", "init": "observer"}}
WEIGHTS = {"bits": 4, "granularity": "block", "block_size": BLOCK}


@dataclass(frozen=True)
class Sizes:
    """steps of float training, of quantized training; windows a batch; bytes a window; windows of the test."""

    steps: int = 300
    tuning: int = 60
    batch: int = 8
    length: int = 96
    test: int = 64
    text: int = 6_000_000


# Half a minute for tests of the example, without figures that mean anything.
QUICK = Sizes(steps=20, tuning=4, batch=4, length=32, test=4, text=300_000)

# name -> (configuration, whether it is trained, whether rounding sees data)
METHODS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "W4A16, nearest": ({"extends": "ort-int4-weights"}, False, False),
    "W4A16, GPTQ": ({"extends": "ort-int4-weights"}, False, True),
    "W4A16, QAT": ({"extends": "ort-int4-weights", "torch": {"weights": LEARNED}}, True, True),
    "W4A8, QAT, data in blocks": (
        {
            "extends": "ort-int4-weights",
            "activations": {"scheme": "symmetric", "signed": True},
            "torch": {"weights": LEARNED, "activations": IN_BLOCKS},
        },
        True,
        True,
    ),
    "W4A8 dynamic, GPTQ": ({"extends": "ort-dynamic", "weights": {"bits": 4, "storage": "int4"}}, False, True),
    "W4A8 dynamic, QAT": (
        {"extends": "ort-dynamic", "weights": {"bits": 4, "storage": "int4"}, "torch": {"weights": LEARNED}},
        True,
        True,
    ),
}


def train_float(net: nn.Module, text: Tensor, sizes: Sizes) -> nn.Module:
    """Train the float model: AdamW, one cycle."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=sizes.steps)
    for step in range(sizes.steps):
        ids = draw_windows(text, sizes.batch, sizes.length, generator)
        loss = compute_loss(net(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.step()
        if step % 100 == 0:
            print(f"float step {step}: {float(loss.detach()) / math.log(2):.3f} bits a byte", flush=True)
    return net.eval()


def train_quantized(net: nn.Module, config: dict[str, Any], text: Tensor, sizes: Sizes) -> QuantModel:
    """Continue in few bits, with the float model as teacher."""
    generator = torch.Generator().manual_seed(1)
    example = draw_windows(text, sizes.batch, sizes.length, generator)
    model = QuantModel(net, config, example_inputs=example)
    with qat.observing(model):
        model(example)
    model.init_qat()
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=3e-4, qparam_lr=1e-4))
    pace = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sizes.tuning)
    qat.Pacer(model).attach(optimizer)
    teacher = qat.Distiller(net, temperature=1.0)
    for _ in range(sizes.tuning):
        ids = draw_windows(text, sizes.batch, sizes.length, generator)
        logits = model(ids)
        loss = teacher.loss(logits, teacher.answers(ids), compute_loss(logits, ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.step()
    return model.freeze()


@dataclass(frozen=True)
class Score:
    """bits: a byte of text. agreement: share of bytes for which the likeliest is the float model's."""

    bits: float
    agreement: float


def measure(model: onnx.ModelProto | Path, windows: Tensor, answers: Tensor | None, *, optimize: bool) -> Score:
    """Run a file over the windows. answers: the float model's logits; None for itself."""
    session = Session(model, optimize=optimize)
    logits = torch.from_numpy(
        np.concatenate([session.run({"ids": part.numpy()})["logits"] for part in windows.split(16)])
    )
    same = logits if answers is None else answers
    share = float((logits.argmax(-1) == same.argmax(-1)).double().mean())
    return Score(float(compute_loss(logits, windows)) / math.log(2), share)


def run(folder: Path, sizes: Sizes) -> dict[str, tuple[Score, Score, float]]:
    """All rows: name -> (score as the file says, score as ONNX Runtime runs it, seconds to make it)."""
    torch.manual_seed(0)
    text, unseen = read_sources(sizes.text)
    windows = draw_windows(unseen, sizes.test, sizes.length, torch.Generator().manual_seed(2))
    start = time.perf_counter()
    net = train_float(ByteModel(longest=sizes.length), text, sizes)
    seconds = time.perf_counter() - start
    names = {"input_names": ["ids"], "output_names": ["logits"], "dynamic_batch": True}
    plain = folder / "float.onnx"
    example = windows[:2]
    torch.onnx.export(
        net, (example,), plain, dynamo=True, external_data=False, verbose=False, opset_version=21,
        input_names=["ids"], output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    with torch.no_grad():
        answers = net(windows)
    scores = {"float": (*(measure(plain, windows, answers, optimize=on) for on in (False, True)), seconds)}
    samples = draw_windows(text, 64, sizes.length, torch.Generator().manual_seed(3))
    for name, (config, trained, uses_data) in METHODS.items():
        start, file = time.perf_counter(), folder / f"{name.replace(', ', '-').replace(' ', '-')}.onnx"
        if trained:
            model = train_quantized(copy.deepcopy(net), config, text, sizes)
            export_onnx(model, file, example, overwrite=True, **names)
        else:
            given = {"ids": samples.numpy()} if uses_data else None
            asked = {f"weights.{key}": value for key, value in config.get("weights", {}).items()}
            effort = {"effort": "balanced" if uses_data else "fast"}
            done = onnxq.quantize(plain, given, config["extends"], overrides={**asked, **effort})
            onnx.save(done.model, file)
        seconds = time.perf_counter() - start
        scores[name] = (*(measure(file, windows, answers, optimize=on) for on in (False, True)), seconds)
        print_row(name, *scores[name])
    return scores


def print_row(name: str, said: Score, ran: Score, seconds: float) -> None:
    """A line of the table in the README."""
    print(
        f"| {name} | {said.bits:.3f} | {100 * said.agreement:.1f} | {ran.bits:.3f} | {100 * ran.agreement:.1f} | "
        f"{seconds:.0f} |",
        flush=True,
    )


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one minute, figures without meaning")
    parser.add_argument("--out", type=Path, default=Path("qat_language_model_out"), help="folder for the files")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    scores = run(given.out, QUICK if given.quick else Sizes())
    print("\n| | bits a byte, as the file says | agreement, % | as ONNX Runtime runs it | agreement, % | s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in scores.items():
        print_row(name, *row)


if __name__ == "__main__":
    main()
