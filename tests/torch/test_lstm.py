"""A tagger trained in PyTorch, with its LSTM in ONNX Runtime's integer kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.runtime import Session, optimize_graph

torch = pytest.importorskip("torch")

WORDS, TAGS, LENGTH = 20, 5, 12


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each tag is the sum of a word and the one before, modulo the tags."""
    torch.manual_seed(0)

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = torch.nn.Embedding(WORDS, 32), torch.nn.LSTM(32, 64, bidirectional=True)
            self.head = torch.nn.Linear(128, TAGS)

        def forward(self, ids: Any) -> Any:
            return self.head(self.lstm(self.embed(ids))[0])

    net = Tagger()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(50):
        ids = torch.randint(0, WORDS, (LENGTH, 32))
        loss = torch.nn.functional.cross_entropy(net(ids).reshape(-1, TAGS), find_tags(ids).reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("tagger") / "tagger.onnx"
    example = torch.zeros(LENGTH, 1, dtype=torch.int64)
    torch.onnx.export(
        net.eval(), (example,), path, input_names=["ids"], output_names=["y"], dynamo=False, opset_version=17
    )
    return path


def find_tags(ids: Any) -> Any:
    before = torch.roll(ids, 1, 0)
    before[0] = 0
    return (ids + before) % TAGS


@pytest.mark.filterwarnings("ignore")
def test_a_trained_tagger_keeps_its_answers_in_integers(tagger: Path) -> None:
    force = {"latency": False, "rules": [{"op": "LSTM", "set": {"quantize": True}}]}
    result = onnxq.quantize(tagger, None, "ort-dynamic", overrides=force)
    assert Counter(node.op_type for node in optimize_graph(result.model).graph.node)["DynamicQuantizeLSTM"] == 1
    assert not result.report.warnings
    assert result.report.checks[0].sqnr_db[1] > 25
    ids = np.random.default_rng(0).integers(0, WORDS, (64, LENGTH, 1))
    want = np.stack([find_tags(torch.from_numpy(one)).numpy() for one in ids])
    sessions = {"float": Session(onnx.load(tagger)), "int8": Session(result.model)}
    right = {
        name: np.mean(
            [np.asarray(session.run({"ids": one})["y"]).argmax(-1) == tags for one, tags in zip(ids, want, strict=True)]
        )
        for name, session in sessions.items()
    }
    assert right["float"] > 0.9
    assert right["int8"] > right["float"] - 0.02
