"""Samples of text: windows of tokens fitted to a model's inputs, with the caches that the model itself fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from onnxq.config import DataConfig
from onnxq.data.fit import Array
from onnxq.data.scripts import suggest_files
from onnxq.data.synthetic import count_table_rows
from onnxq.data.text.generate import generate_texts
from onnxq.data.text.inputs import TextInputs, find_text_inputs
from onnxq.data.text.tokenizer import Tokenizer, load_tokenizer
from onnxq.data.text.windows import Window, choose_windows
from onnxq.errors import DataError
from onnxq.files import check_input_kind
from onnxq.graph import ModelLike, ValueInfo, get_index
from onnxq.runtime import Session

# Windows, and tokens in each, if no number is given.
SAMPLES = 64
LENGTH = 256
# Of samples with caches: tokens behind those that the caches hold. One, as in generation, and a few.
_STEPS = (1, 8)
# One sample of so many is such a one: they show few tokens, and rounding wants many.
_EVERY = 4


def make_text_samples(
    path: Path, inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike | None
) -> Iterator[dict[str, Array]]:
    """Make the samples of a text file: windows spread over it.

    Of a decoder with caches most samples are prompts, before which nothing is known; every fourth is one or some
    tokens behind a beginning of the window, which `model` has run and of which the caches hold keys and values.
    Raises DataError for a text that is too short, and for a model that tokens do not feed.
    """
    text = open_text(path, inputs, config, model)
    length = text.length * text.parts.batch
    windows = choose_windows(path, text.tokenizer, length, config.samples or SAMPLES, config.seed)
    session = Session(model, optimize=False) if text.parts.caches and model is not None else None
    return _fit_texts(map(text.shape_ids, windows), text.parts, session, text.length, config.seed)


def make_generated_samples(
    inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike
) -> Iterator[dict[str, Array]]:
    """Make the samples of texts that the model writes itself, like those of `make_text_samples`.

    Raises DataError for a model that tokens do not feed, or that gives no logits.
    """
    parts, rows, length = _describe_inputs(inputs, config, model)
    session = Session(model, optimize=False)
    prefix = load_tokenizer(config.tokenizer).prefix if config.tokenizer else ()
    texts = generate_texts(session, parts, config.samples or SAMPLES, length, rows, prefix, config.seed)
    return _fit_texts(texts, parts, session if parts.caches else None, length, config.seed)


def _fit_texts(
    texts: Iterable[Array], parts: TextInputs, session: Session | None, length: int, seed: int
) -> Iterator[dict[str, Array]]:
    """Make samples of tokens [N, T]. session: fills caches; None where there are none."""
    rng, step = np.random.default_rng(seed), 0
    for k, ids in enumerate(texts):
        if session is None or ((k + 1) % _EVERY and parts.length in (None, length)):
            yield parts.make_feeds(ids)
            continue
        count = min(parts.length or _STEPS[step % len(_STEPS)], ids.shape[1] - 1)
        step += 1
        known = int(rng.integers(ids.shape[1] // 2, ids.shape[1] - count + 1))
        known -= known % (parts.length or 1)
        yield parts.make_feeds(ids[:, known : known + count], parts.run_prompt(session, ids[:, :known]))


class Text:
    """A text file for one model. length: tokens of a window for each row of a batch."""

    def __init__(self, path: Path, parts: TextInputs, tokenizer: Tokenizer, length: int, rows: int | None) -> None:
        self.path, self.parts, self.tokenizer, self.length, self._rows = path, parts, tokenizer, length, rows

    def shape_ids(self, window: Window) -> Array:
        """Tokens [N, T]. Raises DataError for too few, and for tokens that the model's table does not have."""
        batch, fixed = self.parts.batch, not self.parts.caches and self.parts.length is not None
        count = len(window.ids) // batch
        if count < 2 or (fixed and count < self.length):
            cause = f"has {len(window.ids)} tokens, and a window has {self.length * batch if fixed else 2 * batch}"
            raise DataError(self.path, cause, "give a longer text", code="Q224")
        highest = int(window.ids.max())
        if self._rows is not None and highest >= self._rows:
            cause = f"the model's table has {self._rows} tokens, the tokenizer {self.tokenizer.size}"
            fix = "give the tokenizer that belongs to the model with `tokenizer=…`"
            raise DataError(f"token {highest}", cause, fix, code="Q223")
        return window.ids[: count * batch].reshape(batch, count)


def open_text(path: Path, inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike | None) -> Text:
    """Open a text file for a model. Raises DataError without a tokenizer, and for a model that tokens do not feed."""
    tokenizer = find_tokenizer(path, config)
    parts, rows, length = _describe_inputs(inputs, config, model)
    return Text(path, parts, tokenizer, length, rows)


def _describe_inputs(
    inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike | None
) -> tuple[TextInputs, int | None, int]:
    """The inputs by their roles, the rows of the table of tokens where one is known, and the tokens of a window."""
    index = None if model is None else get_index(model)
    parts = find_text_inputs(inputs, [] if index is None else [value.name for value in index.outputs])
    rows = {} if index is None else count_table_rows(inputs, index)
    length = config.sequence_length or LENGTH
    if parts.length is not None:
        # A step of a decoder; of other models the window.
        length = max(length // parts.length, 2) * parts.length if parts.caches else parts.length
    return parts, min(rows.values(), default=None), length


def find_tokenizer(path: Path, config: DataConfig) -> Tokenizer:
    """Load the tokenizer for a text file. Raises DataError without one, and for a text that cannot be read."""
    try:
        check_input_kind(path, DataError)
        path.open("rb").close()
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file", suggest_files(path), code="Q201") from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})", "name a text file", code="Q202") from error
    if not config.tokenizer:
        fix = "name a folder with tokenizer.json, or `bytes` for a model of bytes, with `tokenizer=…`"
        raise DataError(path, "is text, and no tokenizer was given", fix, code="Q220")
    return load_tokenizer(config.tokenizer)
