"""Tokenizers: of a tokenizer.json, which the package tokenizers reads when one is named, and single bytes."""

from __future__ import annotations

import codecs
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from onnxq.config.data import BYTES
from onnxq.errors import DataError, MissingDependencyError
from onnxq.files import check_input_kind, shorten_error


class Tokenizer(Protocol):
    """Text -> tokens. prefix, suffix: special tokens around every text. size: number of tokens there are."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    size: int

    def encode(self, text: bytes, where: str) -> list[int]:
        """Encode text without special tokens. A letter that is cut off at the end is left out.

        Raises DataError, naming `where`, for bytes that are no text.
        """
        ...


class ByteTokenizer:
    """Every byte is its own token."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    size = 256

    def encode(self, text: bytes, where: str) -> list[int]:
        """The values of the bytes."""
        return list(text)


class FileTokenizer:
    """A tokenizer of Hugging Face's library, as models bring it along."""

    def __init__(self, tokenizer: Any) -> None:
        # As files have them, for batches: a window is cut to its length here, and nothing else.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        whole = tokenizer.encode("a", add_special_tokens=True).ids
        start = next((k for k in range(len(whole)) if whole[k : k + len(plain)] == plain), 0)
        self.prefix: tuple[int, ...] = tuple(whole[:start])
        self.suffix: tuple[int, ...] = tuple(whole[start + len(plain) :])

    def encode(self, text: bytes, where: str) -> list[int]:
        """Tokens of UTF-8."""
        try:
            letters = codecs.getincrementaldecoder("utf-8")().decode(text)
        except UnicodeDecodeError as error:
            cause = f"is not UTF-8 ({error.reason} at byte {error.start} of a window)"
            raise DataError(where, cause, "give a text file in UTF-8", code="Q221") from error
        ids: list[int] = self._tokenizer.encode(letters, add_special_tokens=False).ids
        return ids


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer. name: a folder with tokenizer.json, the file itself, or "bytes".

    Raises DataError for a file that is missing or is none, MissingDependencyError without the package tokenizers.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if os.path.isdir(name) else Path(name)
    fix = f"name a folder with tokenizer.json, the file, or {BYTES!r} for a model of bytes"
    try:
        check_input_kind(path, DataError)
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error})"
        written = "; the tokenizer of `transformers` writes one by save_pretrained(FOLDER)"
        raise DataError(path, cause, fix + written, code="Q222") from error
    library = _import_tokenizers()
    try:
        return FileTokenizer(library.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library's errors are plain Exceptions, with the reason in their text
        raise DataError(path, f"is no tokenizer ({shorten_error(error)})", fix, code="Q222") from error


def _import_tokenizers() -> Any:
    """Import the package. Raises MissingDependencyError without it."""
    try:
        return import_module("tokenizers")
    except ImportError as error:
        cause = f"reading tokenizer.json needs the package tokenizers ({error})"
        raise MissingDependencyError("tokenizers", cause, "pip install 'onnxq[text]'", code="Q810") from error
