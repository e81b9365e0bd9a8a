"""The example of a decoder, in small: trained, exported with its caches, run and quantized on text."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import onnxq
from onnxq.evaluation.perplexity import Decoder
from onnxq.runtime import Session
from tests.data.text.kit import make_text

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "examples" / "language_model"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("train"), importlib.import_module("export")
    # Other examples have modules of these names.
    for name in ("train", "export", "net", "text"):
        sys.modules.pop(name, None)


# torch's own, of torch.onnx.export: a deprecated check, and names of axes that several inputs share.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:# The axis name")
def test_what_is_trained_runs_with_caches_and_in_four_bits(example: Any, tmp_path: Path) -> None:
    train, export = example
    (tmp_path / "test.txt").write_bytes(make_text(200))
    text = torch.frombuffer(bytearray(make_text(200)), dtype=torch.uint8)
    torch.manual_seed(0)
    net = train.ByteDecoder(train.Shape(width=32, layers=1, heads=2, kept=1, hidden=64))
    train.train(net, (text, text), 0.2, tmp_path / "model.pt", batch=2, length=32)
    restored = export.load_checkpoint(tmp_path / "model.pt")
    file = export.export_decoder(restored, tmp_path / "model.onnx")
    decoder = Decoder(Session(file), "model.onnx")
    ids = text[:20].long()
    with torch.no_grad():
        wanted = restored(ids[None])[0][0]
    for rows in (20, 7):
        got = torch.cat([torch.from_numpy(one) for one in decoder.read_logits(ids.numpy(), rows)])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    asked = {"tokenizer": "bytes", "sequence_length": 32, "samples": 8}
    made = onnxq.quantize(file, tmp_path / "test.txt", "ort-int4-weights", overrides={**asked, "latency": False})
    found = onnxq.perplexity(
        [file, made.model], tmp_path / "test.txt", overrides={**asked, "generate": 4, "prompts": 2, "latency": False}
    )
    first, second = found.models
    assert first.perplexity < 256
    assert 0 < second.divergence < 0.1
    assert second.agreement > 0.8
