"""Tokenizers: bytes, and a tokenizer.json by the package that it is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxq.data.text import load_tokenizer
from onnxq.errors import DataError


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
    with pytest.raises(DataError, match="not UTF-8"):
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
