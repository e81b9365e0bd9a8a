"""Samples of text: prompts, and steps behind caches that hold what the model made of the tokens before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.errors import DataError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.runtime import Session
from tests.data.text.kit import make_decoder, make_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_bytes(make_text())
    return file


def test_caches_are_those_of_the_tokens_before(path: Path) -> None:
    model = name_nodes(make_decoder())
    dataset = load_data(
        path, GraphIndex(model).inputs, DataConfig(tokenizer="bytes", sequence_length=32, samples=8), model
    )
    samples = list(dataset.samples())
    assert [sample["input_ids"].shape[1] for sample in samples] == [32, 32, 32, 1, 32, 32, 32, 8]
    assert [sample["past_key_values.0.key"].shape[2] for sample in samples if sample["input_ids"].shape[1] == 32] == [
        0
    ] * 6
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


def test_the_same_seed_gives_the_same_samples(path: Path) -> None:
    model = name_nodes(make_decoder())
    first, second, other = (
        list(
            load_data(
                path, GraphIndex(model).inputs,
                DataConfig(tokenizer="bytes", sequence_length=32, samples=4, seed=seed), model,
            ).samples()
        )
        for seed in (0, 0, 1)
    )  # fmt: skip
    assert all((a[name] == b[name]).all() for a, b in zip(first, second, strict=True) for name in a)
    assert any(
        a[name].shape != b[name].shape or (a[name] != b[name]).any()
        for a, b in zip(first, other, strict=True)
        for name in a
    )


def test_without_caches_all_samples_are_windows(path: Path) -> None:
    model = name_nodes(make_decoder(caches=False))
    dataset = load_data(path, GraphIndex(model).inputs, DataConfig(tokenizer="bytes", samples=3), model)
    assert [sample["input_ids"].shape for sample in dataset.samples()] == [(1, 256)] * 3


def test_texts_that_do_not_fit(path: Path) -> None:
    model = name_nodes(make_decoder(tokens=64))
    inputs = GraphIndex(model).inputs
    with pytest.raises(DataError, match="has 64 tokens, the tokenizer 256"):
        load_data(path, inputs, DataConfig(tokenizer="bytes"), model)
    with pytest.raises(DataError, match="no tokenizer was given"):
        load_data(path, inputs, DataConfig(), model)
    with pytest.raises(DataError, match="no such file"):
        load_data(path.with_name("b.txt"), inputs, DataConfig(tokenizer="bytes"), model)
    path.write_bytes(b"a")
    with pytest.raises(DataError, match="has 1 tokens"):
        load_data(path, inputs, DataConfig(tokenizer="bytes"), model)
