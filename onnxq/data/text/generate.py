"""Texts that a language model writes itself: samples for it where there is no other text.

Behind a first token at random, each is drawn from the distribution that the model gives (LLM-QAT, Liu et al. 2023,
arXiv 2305.17888; for rounding by second moments Williams et al. 2024, arXiv 2410.17170).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onnxq.data.fit import Array, classify_dtype, find_input_dtype
from onnxq.data.text.inputs import TextInputs
from onnxq.errors import DataError
from onnxq.graph import ValueInfo
from onnxq.runtime import Session

# Texts written side by side, where the model takes any number: a run of many costs little more than one of a few.
_ROWS = 16


def generate_texts(
    session: Session,
    parts: TextInputs,
    count: int,
    length: int,
    tokens: int | None = None,
    prefix: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[Array]:
    """Generate so many texts, int64 [batch, length] each, of the batch that the model takes.

    tokens: rows of its table, where that is smaller than the vocabulary. prefix: special tokens before every text.
    Raises DataError for a model that gives no logits, or takes tokens with its caches in steps of several.
    """
    name = find_logits(session.outputs, parts, "the model")
    if parts.caches and parts.length not in (None, 1):
        raise make_decoder_error("the model", f"takes {parts.length} tokens at a time, so that it cannot write a text")
    rng, left = np.random.default_rng(seed), count * parts.batch
    # A fixed batch is filled by each run.
    rows = min(left, _ROWS) if parts.free_batch else parts.batch
    tokens = tokens or _count_tokens(session, parts, name, rows)
    while left > 0:
        found = _write_rows(session, parts, name, rows, length, tokens, prefix, rng)[:left]
        left -= len(found)
        yield from found.reshape(-1, parts.batch, length)


def _write_rows(
    session: Session, parts: TextInputs, name: str, rows: int, length: int, tokens: int,
    prefix: Sequence[int], rng: np.random.Generator,
) -> Array:  # fmt: skip
    """Integers [rows, length]."""
    ids = np.tile(np.array(prefix[: length - 1], np.int64), (rows, 1))
    caches = parts.make_empty_caches(rows) if parts.caches else None
    known = 0
    # Of the first token nothing is asked but that there is such a one.
    found = rng.integers(0, tokens, rows)
    while True:
        ids = np.concatenate([ids, found[:, None]], axis=1)
        if ids.shape[1] >= length:
            return ids
        new = ids[:, known:]
        if caches is None and parts.length is not None:
            # No token sees those behind it.
            new = np.pad(new, ((0, 0), (0, parts.length - new.shape[1])))
        at = ids.shape[1] - known - 1
        outputs = session.run(parts.make_feeds(new, caches))
        if caches is not None:
            caches, known = parts.read_caches(outputs), ids.shape[1]
        logits = outputs[name]
        # Models that give the last position alone are asked for nothing else.
        found = _draw_tokens(logits[:, min(at, logits.shape[1] - 1), :tokens], rng)


def _count_tokens(session: Session, parts: TextInputs, name: str, rows: int) -> int:
    """The size of the vocabulary, by a run of one token."""
    ids = np.zeros((rows, parts.length or 1), np.int64)
    caches = parts.make_empty_caches(rows) if parts.caches else None
    return int(session.run(parts.make_feeds(ids, caches), [name])[name].shape[-1])


def _draw_tokens(logits: Array, rng: np.random.Generator) -> Array:
    """One token for each row of logits."""
    wide = logits.astype(np.float64)
    shares = np.exp(wide - wide.max(axis=-1, keepdims=True)).cumsum(axis=-1)
    drawn = rng.random((len(shares), 1)) * shares[:, -1:]
    return np.asarray((drawn >= shares).sum(axis=-1)).clip(0, shares.shape[-1] - 1)


def make_decoder_error(name: str, cause: str) -> DataError:
    """The error for a model that does not predict the next token."""
    return DataError(name, cause, "give a decoder that predicts the next token at every position", code="Q225")


def find_logits(outputs: Sequence[ValueInfo], parts: TextInputs, name: str) -> str:
    """The output of logits: called so, or the first of rank 3 that is no cache. name: of the model, for messages.

    Raises DataError where there is none.
    """
    caches = {one.output for one in parts.caches}
    able = [
        value for value in outputs
        if value.name not in caches and len(value.shape or ()) == 3
        and classify_dtype(find_input_dtype(value) or np.dtype(float)) == "float"
    ]  # fmt: skip
    if not able:
        raise make_decoder_error(name, "has no output of floats [samples, tokens, vocabulary]")
    return next((value.name for value in able if "logits" in value.name.lower()), able[0].name)
