#!/usr/bin/env python3
"""Train a small BERT by Hugging Face's Trainer, quantize it by rounding, by GPTQ and by the same Trainer, and compare.

    pip install 'onnxq[cpu,torch]' transformers accelerate
    python examples/qat_text_encoder/run.py      # some minutes on two cores; --quick: half of one, without figures

The encoder reads some bytes of Python's standard library and says of each what a highlighter colours: whether it
belongs to a name, a keyword, a string, a comment. Every row is an exported ONNX file, run by ONNX Runtime on files that
nothing was trained on.
"""

from __future__ import annotations

import argparse
import copy
import io
import keyword
import sysconfig
import time
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

import onnxq
from onnxq import qat
from onnxq.runtime import Session
from torch_frontend.export import export_onnx
from torch_frontend.quant_model import QuantModel

KINDS = ("space", "name", "keyword", "number", "string", "comment", "operator")
# By the type of Python's own tokens; f-strings have three since 3.12.
KIND_OF = {
    "NUMBER": "number", "STRING": "string", "FSTRING_START": "string", "FSTRING_MIDDLE": "string",
    "FSTRING_END": "string", "COMMENT": "comment", "OP": "operator",
}  # fmt: skip
# Of AdamW, in float training and in what follows, in float or quantized.
RATE, TUNING_RATE, DECAY = 2e-3, 5e-4, 0.01

Example = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """steps of both trainings; windows a batch, of training, of the test; bytes a window, of all files; features."""

    steps: int = 1200
    tuning: int = 150
    batch: int = 32
    training: int = 40_000
    test: int = 500
    length: int = 96
    text: int = 2_000_000
    width: int = 64
    layers: int = 2


# Half a minute, without figures that mean anything.
QUICK = Sizes(steps=6, tuning=3, batch=4, training=32, test=8, length=16, text=60_000, width=32, layers=1)


class Way(Enum):
    """How a row comes to its integers: rounded from the float file, the second time with data, or trained."""

    NEAREST = "fast"
    GPTQ = "balanced"
    QAT = "trained"


LEARNED = {"quantizer": {"name": "lsq", "init": "observer"}}
W2A8 = {"extends": "ort-w4a8", "weights": {"bits": 2}}
TRAINED = {"torch": {"weights": LEARNED, "activations": LEARNED}}
METHODS: dict[str, tuple[dict[str, Any], Way]] = {
    "W8A8, nearest": ({"extends": "ort-int8"}, Way.NEAREST),
    "W4A8, nearest": ({"extends": "ort-w4a8"}, Way.NEAREST),
    "W4A8, GPTQ": ({"extends": "ort-w4a8"}, Way.GPTQ),
    "W4A8, QAT": ({"extends": "ort-w4a8", **TRAINED}, Way.QAT),
    "W2A8, GPTQ": (W2A8, Way.GPTQ),
    "W2A8, QAT": ({**W2A8, **TRAINED}, Way.QAT),
}


def make_bert(sizes: Sizes) -> nn.Module:
    """A BERT for bytes, with random weights."""
    config = BertConfig(
        vocab_size=256, hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=4,
        intermediate_size=4 * sizes.width, max_position_embeddings=sizes.length, num_labels=len(KINDS),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForTokenClassification(config).eval()


def label_bytes(source: bytes) -> np.ndarray:
    """The kind of each byte of an ASCII source, as an index into KINDS."""
    starts = np.cumsum([0, *map(len, source.splitlines(keepends=True))])
    labels = np.zeros(len(source) + 1, np.int64)
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        kind = KIND_OF.get(tokenize.tok_name[token.type] if token.type != tokenize.OP else "OP")
        if token.type == tokenize.NAME:
            kind = "keyword" if keyword.iskeyword(token.string) else "name"
        if kind is not None:
            (row, column), (last, end) = token.start, token.end
            labels[starts[row - 1] + column : starts[last - 1] + end] = KINDS.index(kind)
    return labels[:-1]


def read_labelled(limit: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(bytes, kinds) of training and test files of the standard library: every eighth file is for tests."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for k, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        source = file.read_bytes().replace(b"\r\n", b"\n")
        if source.isascii():
            parts[k % 8 == 7].append(source)
        if sum(map(len, parts[0])) > limit:
            break
    training, test = (
        (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).long(),
         torch.from_numpy(np.concatenate([label_bytes(source) for source in part])))
        for part in parts
    )  # fmt: skip
    return training, test


def draw_examples(sizes: Sizes) -> tuple[list[Example], list[Example]]:
    """(training, test) windows of bytes, each byte with its kind."""
    generator, drawn = torch.Generator().manual_seed(0), []
    for (text, labels), count in zip(read_labelled(sizes.text), (sizes.training, sizes.test), strict=True):
        starts = torch.randint(len(text) - sizes.length, (count,), generator=generator)
        where = starts[:, None] + torch.arange(sizes.length)
        drawn.append([{"input_ids": a, "labels": b} for a, b in zip(text[where], labels[where], strict=True)])
    training, test = drawn
    return training, test


def stack_inputs(examples: list[Example]) -> dict[str, Tensor]:
    """A batch without labels, input_ids [N, T]."""
    return {"input_ids": torch.stack([one["input_ids"] for one in examples])}


def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross-entropy outside of the model, so that the one that is trained is the one that is exported."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def train(model: nn.Module, examples: list[Example], steps: int, rate: float, batch: int) -> None:
    """Train a float or quantized model."""
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=rate, weight_decay=DECAY))
    qat.Pacer(model).attach(optimizer)
    with TemporaryDirectory() as checkpoints:  # none is saved, but the Trainer makes the folder
        settings = TrainingArguments(
            checkpoints, max_steps=steps, per_device_train_batch_size=batch, lr_scheduler_type="cosine",
            warmup_steps=steps // 10, remove_unused_columns=False, label_names=["labels"], save_strategy="no",
            logging_steps=100, disable_tqdm=True, report_to=[], use_cpu=True,
        )  # fmt: skip
        Trainer(
            model, settings, train_dataset=examples, compute_loss_func=compute_loss, optimizers=(optimizer, None)
        ).train()
    model.eval()


def train_quantized(net: nn.Module, config: dict[str, Any], examples: list[Example], sizes: Sizes) -> QuantModel:
    """Continue in few bits."""
    inputs = stack_inputs(examples[:: max(len(examples) // 64, 1)])
    model = QuantModel(net, config, example_inputs=inputs)
    with qat.observing(model):
        model(**inputs)
    model.init_qat()
    train(model, examples, sizes.tuning, TUNING_RATE, sizes.batch)
    return model.freeze()


@dataclass(frozen=True)
class Score:
    """Share of right answers, as the file says and as ONNX Runtime runs it; bytes of the file; processor seconds."""

    said: float
    ran: float
    size: int
    seconds: float


def measure(file: Path, examples: list[Example], start: float) -> Score:
    """Run a file over the test. start: process time when its making began."""
    seconds, shares = time.process_time() - start, []
    ids, labels = stack_inputs(examples)["input_ids"].numpy(), torch.stack([one["labels"] for one in examples])
    for optimize in (False, True):
        logits = Session(file, optimize=optimize).run({"input_ids": ids})["logits"]
        shares.append(float((logits.argmax(-1) == labels.numpy()).mean()))
    return Score(*shares, file.stat().st_size, seconds)


def export_float(net: nn.Module, file: Path, inputs: dict[str, Tensor]) -> Path:
    """Write a float model."""
    shapes = {"input_ids": {0: torch.export.Dim("batch")}}
    torch.onnx.export(
        net, (), file, kwargs=inputs, dynamo=True, external_data=False, verbose=False, opset_version=21,
        input_names=["input_ids"], output_names=["logits"], dynamic_shapes=shapes,
    )  # fmt: skip
    return file


def export_quantized(model: QuantModel, file: Path, inputs: dict[str, Tensor]) -> Path:
    """Write a trained model."""
    names = {"input_names": ["input_ids"], "output_names": ["logits"]}
    export_onnx(model, file, inputs, overwrite=True, dynamic_batch=True, **names)
    return file


def run(folder: Path, sizes: Sizes, methods: Mapping[str, tuple[dict[str, Any], Way]]) -> dict[str, Score]:
    """All rows, by their names. What is rounded from a file was trained in float as long as the others in few bits."""
    torch.manual_seed(0)
    examples, test = draw_examples(sizes)
    net, inputs, start = make_bert(sizes), stack_inputs(test[:2]), time.process_time()
    train(net, examples, sizes.steps, RATE, sizes.batch)
    scores = {"float": measure(export_float(net, folder / "float.onnx", inputs), test, start)}
    further, start = copy.deepcopy(net), time.process_time()
    train(further, examples, sizes.tuning, TUNING_RATE, sizes.batch)
    plain = export_float(further, folder / "float-further.onnx", inputs)
    scores["float, trained further"] = measure(plain, test, start)
    samples = {key: value.numpy() for key, value in stack_inputs(examples[:: max(len(examples) // 128, 1)]).items()}
    for name, (config, way) in methods.items():
        start, file = time.process_time(), folder / f"{name.replace(', ', '-')}.onnx"
        if way is Way.QAT:
            model = train_quantized(copy.deepcopy(net), config, examples, sizes)
            export_quantized(model, file, inputs)
        else:
            asked = {f"weights.{key}": value for key, value in config.get("weights", {}).items()}
            done = onnxq.quantize(plain, samples, config["extends"], overrides={**asked, "effort": way.value})
            onnx.save(done.model, file)
        scores[name] = measure(file, test, start)
    return scores


def print_table(scores: Mapping[str, Score]) -> None:
    """The table in the README."""
    print("\n| | right, % as the file says | % as ONNX Runtime runs it | MB | processor s |")
    print("|---|---:|---:|---:|---:|")
    for name, score in scores.items():
        said, ran = 100 * score.said, 100 * score.ran
        print(f"| {name} | {said:.1f} | {ran:.1f} | {score.size / 1e6:.2f} | {score.seconds:.0f} |")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute, figures without meaning")
    parser.add_argument("--out", type=Path, default=Path("qat_text_encoder_out"), help="folder for the files")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print_table(run(given.out, QUICK if given.quick else Sizes(), METHODS))


if __name__ == "__main__":
    main()
