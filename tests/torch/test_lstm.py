"""A tagger trained in PyTorch, with its LSTM in ONNX Runtime's integer kernel."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.commands.results import write_json
from onnxq.pipeline import check
from onnxq.runtime import Session, optimize_graph, time_models

torch = pytest.importorskip("torch")
from tests.torch.nets import Network, take_step

WORDS, TAGS, LENGTH, BATCH = 20, 5, 12, 8


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each tag is the sum of a word and the one before, modulo the tags."""
    torch.manual_seed(0)
    parts = {"embed": torch.nn.Embedding(WORDS, 32), "lstm": torch.nn.LSTM(32, 128, bidirectional=True)}
    net = Network(lambda m, ids: m.head(m.lstm(m.embed(ids))[0]), **parts, head=torch.nn.Linear(256, TAGS))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):
        ids = torch.randint(0, WORDS, (LENGTH, 16))
        take_step(optimizer, torch.nn.functional.cross_entropy(net(ids).reshape(-1, TAGS), find_tags(ids).reshape(-1)))
    path = tmp_path_factory.mktemp("tagger") / "tagger.onnx"
    example = torch.zeros(LENGTH, 1, dtype=torch.int64)
    torch.onnx.export(
        net.eval(), (example,), path, input_names=["ids"], output_names=["y"], dynamo=False, opset_version=17,
        dynamic_axes={"ids": {1: "N"}},
    )  # fmt: skip
    return path


def find_tags(ids: Any) -> Any:
    before = torch.roll(ids, 1, 0)
    before[0] = 0
    return (ids + before) % TAGS


def count_right(model: onnx.ModelProto) -> float:
    """The share of tags that a model gives right."""
    ids = np.random.default_rng(0).integers(0, WORDS, (16, LENGTH, BATCH))
    want = np.stack([find_tags(torch.from_numpy(one)).numpy() for one in ids])
    session = Session(model)
    return float(np.mean([session.run({"ids": one})["y"].argmax(-1) for one in ids] == want))


@pytest.mark.filterwarnings("ignore")
def test_a_trained_tagger_keeps_its_answers_in_integers(tagger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "time_models", partial(time_models, seconds=0.2))
    samples = {"ids": np.random.default_rng(1).integers(0, WORDS, (24, LENGTH, BATCH))}
    result = onnxq.quantize(tagger, samples, overrides={"effort": "fast", "embeddings": "float"})
    # Eight sequences a run, which pays on every kind of CPU: nothing forces the kernel.
    kernels = Counter(node.op_type for node in optimize_graph(result.model).graph.node)
    assert (kernels["DynamicQuantizeLSTM"], kernels["LSTM"]) == (1, 0)
    assert not result.report.warnings
    assert min(result.report.checks[0].sqnr_db) > 25
    right = count_right(onnx.load(tagger))
    assert right > 0.9
    assert count_right(result.model) > right - 0.02
    assert not onnxq.prove(result.model, overrides={"engine": "ort", "require": [("int8", "LSTM")]}).unmet
    latency = result.report.latency
    told = json.loads(write_json(result.report))["latency"]
    assert (told["float_ms"], told["int8_ms"]) == (latency.float_ms, latency.int8_ms)
    assert bool(latency.reason) == (latency.ratio < 1)
    # The first axis is time.
    assert latency.batch == 0
