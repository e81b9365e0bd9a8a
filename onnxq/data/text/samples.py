"""Text as samples: a file cut into windows of tokens, or texts that a language model writes itself."""

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxq.arrays import Array, as_int64
from onnxq.config import DataConfig
from onnxq.config.data import BYTES
from onnxq.data.fit import Feeds, Inputs
from onnxq.data.synthetic import count_table_rows, settle_caches
from onnxq.data.text.generate import TextInputs, find_text_inputs, generate_texts
from onnxq.errors import DataError, MissingDependencyError, suggest_files
from onnxq.files import check_input_kind, explain_unreadable, shorten_error
from onnxq.graph import ModelLike, get_index
from onnxq.runtime import Session

# Numbers of a tokenizer.
Tokens = tuple[int, ...]


class Tokenizer(Protocol):
    """Text -> tokens. prefix, suffix: special tokens around every text. size: number of tokens there are."""

    prefix: Tokens
    suffix: Tokens
    size: int

    def encode(self, text: bytes, where: str) -> list[int]:
        """Encode text without special tokens. A letter that is cut off at the end is left out.

        Raises DataError, naming `where`, for bytes that are no text.
        """
        ...


class ByteTokenizer:
    """Every byte is its own token."""

    prefix: Tokens = ()
    suffix: Tokens = ()
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
        # Special tokens of a beginning and an end stand around a text that is known.
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        whole = tokenizer.encode("a", add_special_tokens=True).ids
        start = next((k for k in range(len(whole)) if whole[k : k + len(plain)] == plain), 0)
        self.prefix = tuple(whole[:start])
        self.suffix = tuple(whole[start + len(plain) :])

    def encode(self, text: bytes, where: str) -> list[int]:
        """Tokens of UTF-8."""
        try:
            # A window may end within a character, which the incremental decoder leaves out.
            letters = codecs.getincrementaldecoder("utf-8")().decode(text)
        except UnicodeDecodeError as error:
            cause = f"is not UTF-8 ({error.reason} at byte {error.start} of a window)"
            raise DataError(where, cause, "give a text file in UTF-8", code="Q221") from error
        # They are put around whole windows: see `prefix` and `suffix`.
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
        cause = explain_unreadable(error)
        written = "; the tokenizer of `transformers` writes one by save_pretrained(FOLDER)"
        raise DataError(path, cause, fix + written, code="Q222") from error
    library = _import_tokenizers()
    try:
        return FileTokenizer(library.Tokenizer.from_file(str(path)))
    # The library's errors are plain Exceptions, with the reason in their text.
    except Exception as error:
        raise DataError(
            path, f"is no tokenizer ({shorten_error(error)})", fix, code="Q222"
        ) from error


def _import_tokenizers() -> Any:
    """Import the package. Raises MissingDependencyError without it."""
    try:
        return import_module("tokenizers")
    except ImportError as error:
        cause = f"reading tokenizer.json needs the package tokenizers ({error})"
        raise MissingDependencyError(
            "tokenizers", cause, 'pip install "onnxq[text]"', code="Q810"
        ) from error


# Bytes encoded at a time, up to the end of a line where one is near.
_PIECE = 2**20
# Bytes within which a window looks for the beginning of a line.
_LINE = 4096


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens of a piece of text. ids: integers [T], special tokens around them. size: bytes of its text."""

    ids: Array
    size: float


def read_windows(path: Path, tokenizer: Tokenizer, length: int) -> Iterator[Window]:
    """Read a text from its beginning: windows of `length` tokens, one behind the other; the last may be shorter."""
    waiting = []
    count = _count_tokens(tokenizer, length, path)
    for piece in _read_pieces(path):
        ids = tokenizer.encode(piece, str(path))
        waiting += ids
        # Bytes of a window as its tokens' share of the piece: tokens do not say where they end.
        share = len(piece) / max(len(ids), 1)
        while len(waiting) >= count:
            yield _wrap_tokens(waiting[:count], tokenizer, share)
            waiting = waiting[count:]
    if len(waiting) > 1:
        yield _wrap_tokens(waiting, tokenizer, share)


def choose_windows(
    path: Path, tokenizer: Tokenizer, length: int, count: int, seed: int
) -> Iterator[Window]:
    """Read `count` windows of `length` tokens from places spread over a text, each at the beginning of a line.

    The seed chooses the place within each of `count` equal parts. A window at the end begins earlier, so that all are
    of one length, and windows may overlap. Fewer where the text has fewer tokens, but one at least.
    """
    most = _count_tokens(tokenizer, length, path)
    size = path.stat().st_size
    starts = (np.arange(count) + np.random.default_rng(seed).random(count)) * size / count
    with path.open("rb") as file:
        for start in np.unique(as_int64(starts)):
            # As if each token were a byte, and more until there are enough.
            reach = most
            while True:
                # Moved to the front where too little text follows.
                first = max(0, min(int(start), size - reach))
                file.seek(first)
                piece = _drop_broken_line(file.read(reach + _LINE)) if first else file.read(reach)
                ids = tokenizer.encode(piece, str(path))
                if len(ids) >= most or reach >= size:
                    break
                reach *= 2
            yield _wrap_tokens(ids[:most], tokenizer, len(piece) / max(len(ids), 1))
            if len(ids) < most:  # these are all
                return


def _drop_broken_line(piece: bytes) -> bytes:
    """Text from the beginning of its next line; without one nearby, from its next whole letter on."""
    end = piece.find(b"\n", 0, _LINE)
    if end >= 0:
        return piece[end + 1 :]
    # Bytes 10xxxxxx continue a letter of UTF-8, which has three of them at most.
    starts = (k for k in range(3) if piece[k : k + 1] and piece[k] & 0xC0 != 0x80)
    return piece[next(starts, 3) :]


def _count_tokens(tokenizer: Tokenizer, length: int, path: Path) -> int:
    """Tokens of text in a window."""
    count = length - len(tokenizer.prefix) - len(tokenizer.suffix)
    if count < 1:
        cause = f"of the {length} tokens of a window none is left beside the special ones"
        raise DataError(path, cause, "give a larger `sequence_length=…`", code="Q224")
    return count


def _wrap_tokens(ids: list[int], tokenizer: Tokenizer, share: float) -> Window:
    return Window(as_int64([*tokenizer.prefix, *ids, *tokenizer.suffix]), len(ids) * share)


def _read_pieces(path: Path) -> Iterator[bytes]:
    """Read a file in pieces that end with a line, where lines are of usual length."""
    left = b""
    with path.open("rb") as file:
        while block := file.read(_PIECE):
            block = left + block
            # A line longer than a piece is cut.
            end = block.rfind(b"\n") + 1 or len(block)
            left = block[end:]
            yield block[:end]
    if left:
        yield left


# Windows, and tokens in each, if no number is given.
SAMPLES = 64
LENGTH = 256
# Of samples with caches: tokens behind those that the caches hold. One, as in generation, and a few.
_STEPS = (1, 8)
# One sample of so many is such a one: they show few tokens, and rounding wants many.
_EVERY = 4


def make_text_samples(
    path: Path, inputs: Inputs, config: DataConfig, model: ModelLike | None
) -> Iterator[Feeds]:
    """Make the samples of a text file: windows spread over it.

    Of a decoder with caches most samples are prompts, before which nothing is known; every fourth is one or some
    tokens behind a beginning of the window, which `model` has run and of which the caches hold keys and values.
    Raises DataError for a text that is too short, and for a model that tokens do not feed.
    """
    tokenizer = find_tokenizer(path, config)
    parts, rows, length = _describe_inputs(inputs, config, model)
    size = length * parts.batch
    windows = choose_windows(path, tokenizer, size, config.samples or SAMPLES, config.seed)
    least = max(length, 2) if parts.length is not None and not parts.caches else 2

    def shape_ids(window: Window) -> Array:
        count = len(window.ids) // parts.batch
        if count < least:
            cause = f"has {len(window.ids)} tokens, and a window has {least * parts.batch}"
            raise DataError(path, cause, "give a longer text", code="Q224")
        highest = int(window.ids.max())
        if rows is not None and highest >= rows:
            cause = f"the model's table has {rows} tokens, the tokenizer {tokenizer.size}"
            fix = "give the tokenizer that belongs to the model with `tokenizer=…`"
            raise DataError(f"token {highest}", cause, fix, code="Q223")
        return window.ids[: count * parts.batch].reshape(parts.batch, count)

    session = Session(model, optimize=False) if parts.caches and model is not None else None
    return _fit_texts(map(shape_ids, windows), parts, session, length, config.seed)


def make_generated_samples(inputs: Inputs, config: DataConfig, model: ModelLike) -> Iterator[Feeds]:
    """Make the samples of texts that the model writes itself, like those of `make_text_samples`.

    Raises DataError for a model that tokens do not feed, or that gives no logits.
    """
    parts, rows, length = _describe_inputs(inputs, config, model)
    session = Session(model, optimize=False)
    prefix = load_tokenizer(config.tokenizer).prefix if config.tokenizer else ()
    texts = generate_texts(
        session, parts, config.samples or SAMPLES, length, rows, prefix, config.seed
    )
    return _fit_texts(texts, parts, session if parts.caches else None, length, config.seed)


def _fit_texts(
    texts: Iterable[Array], parts: TextInputs, session: Session | None, length: int, seed: int
) -> Iterator[Feeds]:
    """Make samples of tokens [N, T]. session: fills caches; None where there are none."""
    rng = np.random.default_rng(seed)
    step = 0
    several = session is None or parts.length or parts.takes_several(session)
    steps = _STEPS if several else _STEPS[:1]
    for k, ids in enumerate(texts):
        if session is None or ((k + 1) % _EVERY and parts.length in (None, length)):
            yield parts.make_feeds(ids)
            continue
        count = min(parts.length or steps[step % len(steps)], ids.shape[1] - 1)
        step += 1
        known = int(rng.integers(ids.shape[1] // 2, ids.shape[1] - count + 1))
        known -= known % (parts.length or 1)
        yield parts.make_feeds(
            ids[:, known : known + count], parts.run_prompt(session, ids[:, :known])
        )


def _describe_inputs(
    inputs: Inputs, config: DataConfig, model: ModelLike | None
) -> tuple[TextInputs, int | None, int]:
    """The inputs by their roles, the rows of the table of tokens where one is known, and the tokens of a window."""
    outputs: Sequence[str] = ()
    rows: int | None = None
    if model is not None:
        index = get_index(model)
        inputs = settle_caches(inputs, model)
        outputs = [value.name for value in index.outputs]
        rows = min(count_table_rows(inputs, index).values(), default=None)
    parts = find_text_inputs(inputs, outputs)
    length = config.sequence_length or LENGTH
    if parts.length is not None:
        # A step of a decoder; of other models the window.
        length = max(length // parts.length, 2) * parts.length if parts.caches else parts.length
    return parts, rows, length


def find_tokenizer(path: Path, config: DataConfig) -> Tokenizer:
    """Load the tokenizer for a text file. Raises DataError without one, and for a text that cannot be read."""
    try:
        check_input_kind(path, DataError)
        path.open("rb").close()
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file", suggest_files(path), code="Q201") from error
    except OSError as error:
        raise DataError(path, explain_unreadable(error), "name a text file", code="Q202") from error
    if not config.tokenizer:
        fix = (
            "name a folder with tokenizer.json, or `bytes` for a model of bytes, with `tokenizer=…`"
        )
        raise DataError(path, "is text, and no tokenizer was given", fix, code="Q220")
    return load_tokenizer(config.tokenizer)
