"""The example of a language model, in small: what it trains is traced, quantized as its table says, and written."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch_frontend.quantizers import Dynamic

FOLDER = Path(__file__).parents[2] / "examples" / "qat_language_model"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    # The module appends the folder of what examples share to this.
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield importlib.import_module("run")
    # Other examples have modules of these names.
    for name in ("run", "rows", "net", "text"):
        sys.modules.pop(name, None)


def test_every_trained_row_is_what_its_name_says(example: Any) -> None:
    torch.manual_seed(0)
    net = example.ByteModel(width=64, layers=1, hidden=64, longest=16).eval()
    text, _ = example.read_sources(example.QUICK.text)
    sizes = replace(example.QUICK, length=16, tuning=2, batch=2)
    for name, (config, way) in example.METHODS.items():
        if way is not example.Way.QAT:
            continue
        model = example.train_quantized(net, config, text, sizes)
        assert model.traced
        weights = {site for site in model.quantizers if site.endswith(".weight")}
        # In mode dynamic, products of this size are not worth their integers.
        wanted = {"head.weight"} if "dynamic" in name else {"blocks.0.down.weight", "blocks.0.attention.key.weight"}
        assert wanted <= weights
        assert {model.quantizers[site].spec.bits for site in weights} == {2 if "W2" in name else 4}
        data = [found for found in model.quantizers.values() if isinstance(found, Dynamic)]
        assert bool(data) is ("W4A8" in name)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of torch.onnx.export
def test_rows_are_files_that_run(example: Any, tmp_path: Path) -> None:
    rows = ("W4A16, nearest", "W4A16, QAT")
    sizes = replace(example.QUICK, length=16, steps=2, tuning=2, batch=2, test=2)
    scores = example.run(tmp_path, sizes, {name: example.METHODS[name] for name in rows})
    assert list(scores) == ["float", "float, trained further", *rows]
    for score in scores.values():
        # No better than any byte as likely as another, yet; ONNX Runtime rounds data to int8 in blocks.
        assert score.said == pytest.approx(8, abs=1)
        assert score.ran == pytest.approx(score.said, abs=0.05)
    assert max(scores[name].size for name in rows) < scores["float"].size / 2
