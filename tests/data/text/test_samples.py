"""Samples of text, read or written by the model itself: prompts, and steps behind caches of the tokens before."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, parser

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.data.text import choose_windows, find_text_inputs, load_tokenizer, read_windows
from onnxq.data.text import samples as module
from onnxq.data.text.generate import generate_texts
from onnxq.errors import DataError
from onnxq.graph import GraphIndex, ValueInfo, name_nodes
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
    assert [sample["input_ids"].shape[1] for sample in data.samples()] == [16, 16, 16, 1, 16, 16, 16, 8]
    assert max(int(sample["input_ids"].max()) for sample in data.samples()) < 40
    assert not data.synthetic


def test_a_model_without_logits_writes_nothing() -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (int64[N,T] ids) => (int64[N,T] y) { y = Abs (ids) }'
    with pytest.raises(DataError, match=r"no output of floats.*\[Q225\]"):
        load("self-generated", name_nodes(parser.parse_model(text)))


# ---- Inputs of models that read tokens: each gets what its name asks for, and others are refused.

INT, INT32, F, F16, B = (
    TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL,
)  # fmt: skip
IDS = ValueInfo("input_ids", INT, ("batch", "length"))


def test_an_encoder() -> None:
    parts = find_text_inputs(
        [
            ValueInfo("input_ids", INT32, ("N", 4)),
            ValueInfo("attention_mask", F, ("N", 4)),
            ValueInfo("token_type_ids", INT, ("N", 4)),
        ],
        ["last_hidden_state"],
    )
    feeds = parts.make_feeds(np.array([[5, 6, 7, 8]]))
    assert parts.length == 4
    assert {name: value.dtype.name for name, value in feeds.items()} == {
        "input_ids": "int32", "attention_mask": "float32", "token_type_ids": "int64",
    }  # fmt: skip
    np.testing.assert_array_equal(feeds["attention_mask"], np.ones((1, 4)))
    np.testing.assert_array_equal(feeds["token_type_ids"], np.zeros((1, 4)))


def test_a_merged_decoder_with_caches_by_any_order() -> None:
    cache = ("batch", 2, "past", 8)
    parts = find_text_inputs(
        [
            IDS, ValueInfo("attention_mask", INT, ("batch", "past + length")),
            ValueInfo("position_ids", INT, ("batch", "length")), ValueInfo("cache_position", INT, ("length",)),
            ValueInfo("past_key_values.0.key", F16, cache), ValueInfo("past_key_values.0.value", F16, cache),
            ValueInfo("use_cache_branch", B, (1,)), ValueInfo("num_logits_to_keep", INT, ()),
        ],
        ["logits", "present.0.value", "present.0.key"],
    )  # fmt: skip
    assert [(one.value.name, one.output, one.axis) for one in parts.caches] == [
        ("past_key_values.0.key", "present.0.key", 2),
        ("past_key_values.0.value", "present.0.value", 2),
    ]
    first = parts.make_feeds(np.zeros((1, 3), np.int64))
    assert first["past_key_values.0.key"].shape == (1, 2, 0, 8)
    assert not first["use_cache_branch"].any()
    assert first["num_logits_to_keep"].shape == ()
    known = {name: np.ones((1, 2, 5, 8), np.float16) for name in ("past_key_values.0.key", "past_key_values.0.value")}
    later = parts.make_feeds(np.zeros((1, 2), np.int64), known)
    assert later["attention_mask"].shape == (1, 7)
    np.testing.assert_array_equal(later["position_ids"], [[5, 6]])
    np.testing.assert_array_equal(later["cache_position"], [5, 6])
    np.testing.assert_array_equal(later["use_cache_branch"], [True])


def test_caches_of_other_names_are_continued_in_their_order() -> None:
    past = [ValueInfo(f"past_{k}", F, (2, "batch", 4, "known", 8)) for k in range(2)]
    parts = find_text_inputs([IDS, *past], ["logits", "state_0", "state_1"])
    assert [(one.output, one.axis) for one in parts.caches] == [("state_0", 3), ("state_1", 3)]
    assert parts.make_empty_caches()["past_0"].shape == (2, 1, 4, 0, 8)


def test_a_prompt_in_steps_leaves_the_caches_of_one_run() -> None:
    session = Session(make_decoder())
    parts = find_text_inputs(session.inputs, [value.name for value in session.outputs])
    ids = np.arange(12)[None]
    whole = parts.run_prompt(session, ids)
    fixed = find_text_inputs(
        [ValueInfo(one.name, one.dtype, ("N", 4)) if one.name == "input_ids" else one for one in session.inputs],
        [value.name for value in session.outputs],
    )
    for name, value in fixed.run_prompt(session, ids).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ([ValueInfo("pixels", F, ("N", 3, 8, 8))], [], "'pixels': no text gives its values"),
        ([IDS, ValueInfo("encoder_hidden_states", F, ("N", "T", 8))], [], "'encoder_hidden_states'"),
        ([IDS, ValueInfo("attention_mask", F, ("N", 1, "T", "S"))], [], "'attention_mask'"),
        ([IDS, ValueInfo("decoder_input_ids", INT, ("N", "T"))], [], "2 inputs for tokens"),
        ([IDS, ValueInfo("past.0", F, ("batch", 1, 64, 8))], ["logits", "present.0"], "0 of no fixed size"),
        ([IDS, ValueInfo("past.0", F, ("batch", 1, "P", 8))], ["logits"], "1 caches and 0 outputs"),
    ],
)
def test_inputs_that_no_text_gives(inputs: list[ValueInfo], outputs: list[str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        find_text_inputs(inputs, outputs)


# ---- Tokenizers and windows of a text: of one length, spread over it or one behind the other.


class Wrapped:
    """Every two bytes are a token, with one in front and one behind."""

    prefix, suffix, size = (1,), (2,), 256

    def encode(self, text: bytes, where: str) -> list[int]:
        return [text[k] for k in range(0, len(text), 2)]


def test_a_text_is_read_once_from_its_beginning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pieces that end with a line do not show in windows.
    monkeypatch.setattr(module, "_PIECE", 100)
    text = path.read_bytes()
    found = list(read_windows(path, load_tokenizer("bytes"), 64))
    assert b"".join(bytes(one.ids.tolist()) for one in found) == text
    assert {len(one.ids) for one in found[:-1]} == {64}
    assert sum(one.size for one in found) == pytest.approx(len(text))


def test_windows_are_spread_and_begin_with_lines(path: Path) -> None:
    text = path.read_bytes()
    found = [bytes(one.ids.tolist()) for one in choose_windows(path, load_tokenizer("bytes"), 64, 8, seed=0)]
    places = [text.index(one) for one in found]
    assert places == sorted(set(places))
    assert places[-1] - places[0] > len(text) / 2
    assert all(place == 0 or text[place - 1 : place] == b"\n" for place in places)
    assert {len(one) for one in found} == {64}
    again = [bytes(one.ids.tolist()) for one in choose_windows(path, load_tokenizer("bytes"), 64, 8, seed=1)]
    assert again != found


def test_special_tokens_stand_around_each_window(path: Path) -> None:
    for found in (list(choose_windows(path, Wrapped(), 10, 3, 0)), list(read_windows(path, Wrapped(), 10))[:3]):
        assert [(len(one.ids), one.ids[0], one.ids[-1]) for one in found] == [(10, 1, 2)] * 3
        assert [one.size for one in found] == pytest.approx([16] * 3, rel=0.02)


def test_a_short_text_is_one_window(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ä one".encode())
    found = list(choose_windows(tmp_path / "a.txt", load_tokenizer("bytes"), 64, 8, 0))
    assert [bytes(one.ids.tolist()).decode() for one in found] == ["ä one"]


def test_no_window_is_of_special_tokens_alone(path: Path) -> None:
    with pytest.raises(DataError, match="none is left"):
        next(choose_windows(path, Wrapped(), 2, 1, 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of words, with a special token in front and one behind, that cuts and fills up."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[start]": 0, "[end]": 1, "[other]": 2, "a": 3, "tale": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[other]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[start] $A [end]", special_tokens=[("[start]", 0), ("[end]", 1)]
    )
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokens_are_those_of_the_file_without_its_limits(folder: Path) -> None:
    for name in (folder, folder / "tokenizer.json"):
        found = load_tokenizer(str(name))
        assert found.encode(b"a tale of a tale", "text") == [3, 4, 2, 3, 4]
        assert (found.prefix, found.suffix, found.size) == ((0,), (1,), 5)


def test_text_that_is_cut_within_a_letter_and_text_that_is_none(folder: Path) -> None:
    found = load_tokenizer(str(folder))
    assert found.encode("a tale ä".encode()[:-1], "text") == [3, 4]
    with pytest.raises(DataError, match=r"not UTF-8.*\[Q221\]"):
        found.encode(b"a \xff tale", "text")


def test_files_that_are_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer") as caught:
        load_tokenizer(str(folder))
    assert "tokenizer.json" in caught.value.fix
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        load_tokenizer(str(folder / "none"))


def test_bytes_need_no_package() -> None:
    found = load_tokenizer("bytes")
    assert (found.encode("ä".encode(), ""), found.prefix, found.suffix, found.size) == ([195, 164], (), (), 256)
