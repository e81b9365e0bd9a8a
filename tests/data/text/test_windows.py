"""Windows of a text: of one length, spread over it or one behind the other, of any tokenizer."""

from __future__ import annotations

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
