"""Tables of one network in few bits, by rounding its file and by training: what the examples of QAT share."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import onnxq
from onnxq import qat
from onnxq.runtime import Session
from torch_frontend.export import export_onnx
from torch_frontend.quant_model import QuantModel

Inputs = dict[str, Tensor]
Sizes = TypeVar("Sizes")


class Way(Enum):
    """How a row comes to its integers: rounded from the float file, the second time with data, or trained."""

    NEAREST = "fast"
    GPTQ = "balanced"
    QAT = "trained"


Methods = Mapping[str, tuple[dict[str, Any], Way]]


@dataclass(frozen=True)
class Task:
    """An untrained network, and how it is trained and measured.

    train: in float, further or from the start. train_quantized: continues in few bits, and freezes.
    inputs: an example, by name. samples: the data by which a file is rounded. measure: the score of a file's session.
    """

    net: nn.Module
    train: Callable[[nn.Module, bool], nn.Module]
    train_quantized: Callable[[nn.Module, dict[str, Any]], QuantModel]
    inputs: Inputs
    samples: Callable[[Way], dict[str, np.ndarray] | None]
    measure: Callable[[Session], float]


@dataclass(frozen=True)
class Score:
    """The measure of a file as it says, and as ONNX Runtime runs it; its bytes; processor seconds."""

    said: float
    ran: float
    size: int
    seconds: float


def observe(net: nn.Module, config: dict[str, Any], inputs: Inputs) -> QuantModel:
    """The network with quantizers that have seen these inputs, ready to be trained."""
    model = QuantModel(net, config, example_inputs=inputs)
    with qat.observing(model):
        model(**inputs)
    return model.init_qat()


def export_float(net: nn.Module, file: Path, inputs: Inputs) -> Path:
    """Write a float model."""
    torch.onnx.export(
        net, (), file, kwargs=inputs, dynamo=True, external_data=False, verbose=False, opset_version=21,
        input_names=list(inputs), output_names=["logits"],
        dynamic_shapes={name: {0: torch.export.Dim("batch")} for name in inputs},
    )  # fmt: skip
    return file


def export_quantized(model: QuantModel, file: Path, inputs: Inputs) -> Path:
    """Write a trained model."""
    names = {"input_names": list(inputs), "output_names": ["logits"]}
    export_onnx(model, file, inputs, force=True, dynamic_batch=True, **names)
    return file


def round_file(
    plain: Path, config: dict[str, Any], way: Way, samples: dict[str, np.ndarray] | None
) -> onnx.ModelProto:
    """Quantize a float file by onnxq alone."""
    asked = {f"weights.{key}": value for key, value in config.get("weights", {}).items()}
    return onnxq.quantize(
        plain, samples, config["extends"], overrides={**asked, "effort": way.value}
    ).model


def measure_file(file: Path, measure: Callable[[Session], float], start: float) -> Score:
    """Run a file. start: process time when its making began."""
    seconds = time.process_time() - start
    said, ran = (measure(Session(file, optimize=optimize)) for optimize in (False, True))
    return Score(said, ran, file.stat().st_size, seconds)


def make_rows(task: Task, folder: Path, methods: Methods) -> dict[str, Score]:
    """All rows, by their names. What is rounded from a file was trained in float as long as the others in few bits."""
    start = time.process_time()
    net = task.train(task.net, False)
    scores = {
        "float": measure_file(
            export_float(net, folder / "float.onnx", task.inputs), task.measure, start
        )
    }
    start = time.process_time()
    further = task.train(copy.deepcopy(net), True)
    plain = export_float(further, folder / "float-further.onnx", task.inputs)
    scores["float, trained further"] = measure_file(plain, task.measure, start)
    for name, (config, way) in methods.items():
        start, file = (
            time.process_time(),
            folder / f"{name.replace(', ', '-').replace(' ', '-')}.onnx",
        )
        if way is Way.QAT:
            export_quantized(task.train_quantized(copy.deepcopy(net), config), file, task.inputs)
        else:
            onnx.save(round_file(plain, config, way, task.samples(way)), file)
        scores[name] = measure_file(file, task.measure, start)
    return scores


def print_table(
    scores: Mapping[str, Score], heads: tuple[str, str], show: Callable[[float], str]
) -> None:
    """The table in a README. heads: of both measures; show: one of them as text."""
    print(f"\n| | {heads[0]} | {heads[1]} | MB | processor s |")
    print("|---|---:|---:|---:|---:|")
    for name, score in scores.items():
        print(
            f"| {name} | {show(score.said)} | {show(score.ran)} | {score.size / 1e6:.2f} | {score.seconds:.0f} |"
        )


def read_arguments(
    description: str | None, out: str, full: Sizes, quick: Sizes
) -> tuple[Path, Sizes]:
    """(folder for the files, sizes) of the command line. out: the folder where none is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="about a minute, figures without meaning"
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the files")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    return given.out, quick if given.quick else full
