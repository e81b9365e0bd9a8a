"""Texts that a model writes itself: drawn from its own distribution, the same with caches as without."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import ModelProto, parser

from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.data.text import find_text_inputs
from onnxq.data.text.generate import generate_texts
from onnxq.errors import DataError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.runtime import Session
from tests.data.text.kit import make_decoder


def _write(model: ModelProto, count: int, length: int, **how: int) -> list[np.ndarray]:
    session = Session(model)
    parts = find_text_inputs(session.inputs, [value.name for value in session.outputs])
    return list(generate_texts(session, parts, count, length, **how))


def test_caches_change_no_text() -> None:
    with_caches, without = (_write(name_nodes(make_decoder(caches=caches)), 20, 12) for caches in (True, False))
    assert [ids.shape for ids in with_caches] == [(1, 12)] * 20
    assert np.array_equal(with_caches, without)
    assert not np.array_equal(with_caches, _write(name_nodes(make_decoder()), 20, 12, seed=1))


def test_tokens_come_as_often_as_the_model_says() -> None:
    # Behind token 0 token 1 comes in three of four texts, behind all others 0.
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (int64[N,T] ids) => (float[N,T,3] logits) <float[3,3] table = {0, 1.0986123, -99, 9, -99, -99, 9, -99, -99}>
    { logits = Gather (table, ids) }"""
    texts = np.concatenate(_write(parser.parse_model(text), 150, 41))
    follows = Counter(zip(texts[:, :-1].ravel().tolist(), texts[:, 1:].ravel().tolist(), strict=True))
    assert follows[0, 2] == follows[1, 1] == follows[1, 2] == follows[2, 1] == follows[2, 2] == 0
    # Of some 4800 draws, with a standard deviation of .006.
    assert abs(follows[0, 1] / (follows[0, 0] + follows[0, 1]) - 0.75) < 0.03


def test_samples_are_prompts_and_steps() -> None:
    model = name_nodes(make_decoder(tokens=40))
    data = load_data("self-generated", GraphIndex(model).inputs, DataConfig(samples=8, sequence_length=16), model)
    lengths = [sample["input_ids"].shape[1] for sample in data.samples()]
    assert lengths == [16, 16, 16, 1, 16, 16, 16, 8]
    assert max(int(sample["input_ids"].max()) for sample in data.samples()) < 40
    assert not data.synthetic


def test_a_model_without_logits_writes_nothing() -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (int64[N,T] ids) => (int64[N,T] y) { y = Abs (ids) }'
    model = name_nodes(parser.parse_model(text))
    with pytest.raises(DataError, match="no output of floats"):
        load_data("self-generated", GraphIndex(model).inputs, DataConfig(), model)
