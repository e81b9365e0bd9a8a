#!/usr/bin/env python3
"""Train a small BERT by Hugging Face's Trainer, quantize it by rounding, by GPTQ and by the same Trainer, and compare.

    pip install "onnxq[cpu,torch]" transformers accelerate
    python examples/qat_text_encoder/run.py      # some minutes on two cores; --quick: half of one, without figures

The encoder reads some bytes of Python's standard library and says of each what a highlighter colours: whether it
belongs to a name, a keyword, a string, a comment. Every row is an exported ONNX file, run by ONNX Runtime on files that
nothing was trained on.
"""

from __future__ import annotations

import io
import keyword
import sys
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).parents[1]))
from onnxq import qat
from onnxq.runtime import Session
from rows import Methods, Score, Task, Way, make_rows, observe, print_table, read_arguments
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
QUICK = Sizes(
    steps=6, tuning=3, batch=4, training=32, test=8, length=16, text=60_000, width=32, layers=1
)


LEARNED = {"quantizer": {"name": "lsq", "init": "observer"}}
W2A8 = {"extends": "ort-w4a8", "weights": {"bits": 2}}
TRAINED = {"torch": {"weights": LEARNED, "activations": LEARNED}}
METHODS: Methods = {
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
        if parts[1] and sum(map(len, parts[0])) > limit:
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
    for (text, labels), count in zip(
        read_labelled(sizes.text), (sizes.training, sizes.test), strict=True
    ):
        starts = torch.randint(len(text) - sizes.length, (count,), generator=generator)
        where = starts[:, None] + torch.arange(sizes.length)
        drawn.append(
            [{"input_ids": a, "labels": b} for a, b in zip(text[where], labels[where], strict=True)]
        )
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
            model,
            settings,
            train_dataset=examples,
            compute_loss_func=compute_loss,
            optimizers=(optimizer, None),
        ).train()
    model.eval()


def train_quantized(
    net: nn.Module, config: dict[str, Any], examples: list[Example], sizes: Sizes
) -> QuantModel:
    """Continue in few bits."""
    model = observe(net, config, stack_inputs(examples[:: max(len(examples) // 64, 1)]))
    train(model, examples, sizes.tuning, TUNING_RATE, sizes.batch)
    return model.freeze()


def measure_share(session: Session, examples: list[Example]) -> float:
    """Share of right answers."""
    ids, labels = (
        stack_inputs(examples)["input_ids"].numpy(),
        torch.stack([one["labels"] for one in examples]),
    )
    return float((session.run({"input_ids": ids})["logits"].argmax(-1) == labels.numpy()).mean())


def run(folder: Path, sizes: Sizes, methods: Methods) -> dict[str, Score]:
    """All rows, by their names."""
    torch.manual_seed(0)
    examples, test = draw_examples(sizes)
    seen = stack_inputs(examples[:: max(len(examples) // 128, 1)])

    def train_plain(net: nn.Module, further: bool) -> nn.Module:
        steps, rate = (sizes.tuning, TUNING_RATE) if further else (sizes.steps, RATE)
        train(net, examples, steps, rate, sizes.batch)
        return net

    task = Task(
        net=make_bert(sizes),
        train=train_plain,
        train_quantized=lambda net, config: train_quantized(net, config, examples, sizes),
        inputs=stack_inputs(test[:2]),
        samples=lambda way: {key: value.numpy() for key, value in seen.items()},
        measure=lambda session: measure_share(session, test),
    )
    return make_rows(task, folder, methods)


def main() -> None:
    """Run everything and print the table."""
    folder, sizes = read_arguments(__doc__, "qat_text_encoder_out", Sizes(), QUICK)
    heads = ("accuracy as the file says, %", "as ONNX Runtime runs it, %")
    print_table(run(folder, sizes, METHODS), heads, lambda share: f"{100 * share:.1f}")


if __name__ == "__main__":
    main()
