"""Tokenizers and windows of a text: of one length, spread over it or one behind the other."""

from pathlib import Path

import pytest

from onnxq.data.text import choose_windows, load_tokenizer, read_windows
from onnxq.data.text import samples as module
from onnxq.errors import DataError
from tests.data.text.kit import make_text


class Wrapped:
    """Every two bytes are a token, with one in front and one behind."""

    prefix, suffix, size = (1,), (2,), 256

    def encode(self, text: bytes, where: str) -> list[int]:
        return [text[k] for k in range(0, len(text), 2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_bytes(make_text())
    return file


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
