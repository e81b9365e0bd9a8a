"""The example of a text encoder, in small: Hugging Face's Trainer trains it with labels, and its file takes none."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the example trains a BERT of transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

FOLDER = Path(__file__).parents[2] / "examples" / "qat_text_encoder"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    # The module appends the folder of what examples share to this.
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield importlib.import_module("run")
    for name in ("run", "rows"):
        sys.modules.pop(name, None)


def test_bytes_have_the_kinds_of_their_tokens(example: Any) -> None:
    source = b'if x:  # no\n    y = "a\nb" + 12\n'.replace(b'"a\nb"', b'"""a\nb"""')
    letters = "".join("snkdt#o"[kind] for kind in example.label_bytes(source))
    assert letters == "kksno" + "ss####s" + "ssss" + "nsos" + "t" * 9 + "sosdds"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_trained_row_is_a_file_without_labels(example: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = replace(example.QUICK, steps=2, tuning=2)
    examples, test = example.draw_examples(sizes)
    assert all(one["labels"].shape == one["input_ids"].shape for one in test)

    config, way = example.METHODS["W4A8, QAT"]
    assert way is example.Way.QAT
    net = example.make_bert(sizes)
    example.train(net, examples, sizes.steps, example.RATE, sizes.batch)
    model = example.train_quantized(net, config, examples, sizes)
    assert {one.spec.bits for site, one in model.quantizers.items() if site.endswith(".weight")} == {4}

    rows = importlib.import_module("rows")
    file = rows.export_quantized(model, tmp_path / "bert.onnx", example.stack_inputs(test[:2]))
    score = rows.measure_file(file, lambda session: example.measure_share(session, test), 0.0)
    assert 0 <= score.said <= 1
    assert [entry.name for entry in onnx.load(file).graph.input] == ["input_ids"]
