"""Samples of text, read or written by the model itself: prompts, and steps behind caches of the tokens before."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.data.text import find_text_inputs
from onnxq.data.text.generate import generate_texts
from onnxq.errors import DataError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.runtime import Session
from tests.data.text.kit import make_decoder, make_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_bytes(make_text())
    return file


def load(source: Path | str, model: ModelProto, **settings: Any) -> Dataset:
    return load_data(source, GraphIndex(model).inputs, DataConfig(**settings), model)


def test_caches_are_those_of_the_tokens_before(path: Path) -> None:
    model = name_nodes(make_decoder())
    samples = list(load(path, model, tokenizer="bytes", sequence_length=32, samples=8).samples())
    assert [sample["input_ids"].shape[1] for sample in samples] == [32, 32, 32, 1, 32, 32, 32, 8]
    prompts = [sample for sample in samples if sample["input_ids"].shape[1] == 32]
    assert {sample["past_key_values.0.key"].shape[2] for sample in prompts} == {0}
    session = Session(model)
    for sample in samples[3::4]:
        known = sample["past_key_values.0.key"].shape[2]
        assert 16 <= known <= 31
        assert sample["attention_mask"].shape[1] == known + sample["input_ids"].shape[1]
        # Behind the right caches a model answers as it does for the whole text.
        text = make_text()
        got = session.run(sample)["logits"]
        ends = [
            _run_whole(session, text[place : place + known] + bytes(sample["input_ids"][0].tolist()))
            for place in (0, *(k + 1 for k, letter in enumerate(text) if letter == 10))
            if text[place + known :].startswith(bytes(sample["input_ids"][0].tolist()))
        ]
        assert any(np.allclose(got[0], one[0, known:], atol=1e-5) for one in ends)


def _run_whole(session: Session, text: bytes) -> np.ndarray:
    count = len(text)
    empty = np.zeros((1, 1, 0, 8), np.float32)
    feeds = {
        "input_ids": np.array([list(text)]), "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None], "past_key_values.0.key": empty, "past_key_values.0.value": empty,
    }  # fmt: skip
    return session.run(feeds)["logits"]


def test_a_model_of_prompts_and_single_tokens_gets_those(path: Path) -> None:
    """Masks of genai's builder in float16 are made for these."""
    model = name_nodes(make_decoder(in_steps=False))
    samples = list(load(path, model, tokenizer="bytes", sequence_length=32, samples=8).samples())
    assert [sample["input_ids"].shape[1] for sample in samples] == [32, 32, 32, 1, 32, 32, 32, 1]
    session = Session(model)
    assert all(session.run(sample)["logits"].shape[1] == sample["input_ids"].shape[1] for sample in samples)


def test_the_same_seed_gives_the_same_samples(path: Path) -> None:
    how = {"tokenizer": "bytes", "sequence_length": 32, "samples": 4}
    first, second, other = (
        [
            {name: value.tolist() for name, value in sample.items()}
            for sample in load(path, name_nodes(make_decoder()), seed=seed, **how).samples()
        ]
        for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


def test_without_caches_all_samples_are_windows(path: Path) -> None:
    dataset = load(path, name_nodes(make_decoder(caches=False)), tokenizer="bytes", samples=3)
    assert [sample["input_ids"].shape for sample in dataset.samples()] == [(1, 256)] * 3


def test_texts_that_do_not_fit(path: Path) -> None:
    model = name_nodes(make_decoder(tokens=64))
    with pytest.raises(DataError, match="has 64 tokens, the tokenizer 256"):
        load(path, model, tokenizer="bytes")
    with pytest.raises(DataError, match="no tokenizer was given"):
        load(path, model)
    with pytest.raises(DataError, match="no such file"):
        load(path.with_name("b.txt"), model, tokenizer="bytes")
    path.write_bytes(b"a")
    with pytest.raises(DataError, match="has 1 tokens"):
        load(path, model, tokenizer="bytes")


def write_texts(model: ModelProto, count: int, length: int, **how: int) -> list[np.ndarray]:
    session = Session(model)
    parts = find_text_inputs(session.inputs, [value.name for value in session.outputs])
    return list(generate_texts(session, parts, count, length, **how))


def test_caches_change_no_text() -> None:
    with_caches, without = (write_texts(name_nodes(make_decoder(caches=caches)), 20, 12) for caches in (True, False))
    assert [ids.shape for ids in with_caches] == [(1, 12)] * 20
    assert np.array_equal(with_caches, without)
    assert not np.array_equal(with_caches, write_texts(name_nodes(make_decoder()), 20, 12, seed=1))


def test_tokens_come_as_often_as_the_model_says() -> None:
    # Behind token 0 token 1 comes in three of four texts, behind all others 0.
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (int64[N,T] ids) => (float[N,T,3] logits) <float[3,3] table = {0, 1.0986123, -99, 9, -99, -99, 9, -99, -99}>
    { logits = Gather (table, ids) }"""
    texts = np.concatenate(write_texts(parser.parse_model(text), 150, 41))
    follows = Counter(zip(texts[:, :-1].ravel().tolist(), texts[:, 1:].ravel().tolist(), strict=True))
    assert follows[0, 2] == follows[1, 1] == follows[1, 2] == follows[2, 1] == follows[2, 2] == 0
    # Of some 4800 draws, with a standard deviation of .006.
    assert abs(follows[0, 1] / (follows[0, 0] + follows[0, 1]) - 0.75) < 0.03


def test_generated_samples_are_prompts_and_steps() -> None:
    data = load("self-generated", name_nodes(make_decoder(tokens=40)), samples=8, sequence_length=16)
    lengths = [sample["input_ids"].shape[1] for sample in data.samples()]
    assert lengths == [16, 16, 16, 1, 16, 16, 16, 8]
    assert max(int(sample["input_ids"].max()) for sample in data.samples()) < 40
    assert not data.synthetic


def test_a_model_without_logits_writes_nothing() -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (int64[N,T] ids) => (int64[N,T] y) { y = Abs (ids) }'
    with pytest.raises(DataError, match=r"no output of floats.*\[Q225\]"):
        load("self-generated", name_nodes(parser.parse_model(text)))
