"""Inputs of a language model, and texts that it writes itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from onnxq.data.fit import Array, Arrays, classify_dtype, find_input_dtype, format_shape
from onnxq.errors import DataError
from onnxq.graph import ValueInfo
from onnxq.runtime import Session


class Role(Enum):
    """The part of an input."""

    # Keys or values, of attention, of the tokens before.
    CACHE = auto()
    # True where the caches count: of If decoders, of which one branch is for prompts.
    BRANCH = auto()
    # Number of positions with logits, from the last one on; 0: all.
    KEPT = auto()
    MASK = auto()
    POSITIONS = auto()
    # Number of the sentence in a pair.
    SENTENCE = auto()
    IDS = auto()


# A part of the input's name -> its role; the first match wins.
_NAMES = (
    ("past", Role.CACHE),
    ("use_cache", Role.BRANCH),
    ("logits_to_keep", Role.KEPT),
    ("mask", Role.MASK),
    ("position", Role.POSITIONS),
    ("token_type", Role.SENTENCE),
    ("segment", Role.SENTENCE),
    ("ids", Role.IDS),
    ("tokens", Role.IDS),
)
# Ranks that each role may have; of a mask 2, since those of scores are exporters' own.
_RANKS = {
    Role.CACHE: (3, 4, 5), Role.BRANCH: (0, 1), Role.KEPT: (0, 1), Role.MASK: (2,), Role.POSITIONS: (1, 2),
    Role.SENTENCE: (2,), Role.IDS: (2,),
}  # fmt: skip
# Of the name of a cache, what its input and its output have in common.
_PREFIXES = re.compile(r"past_key_values?|present_key_values?|past|present")


@dataclass(frozen=True)
class CacheInput:
    """One cache. output: name of the output that continues it. axis: of the tokens."""

    value: ValueInfo
    output: str
    axis: int


@dataclass(frozen=True)
class TextInputs:
    """The inputs of a model by their roles, and its caches.

    batch, length: of the tokens; None for any length. free_batch: True where `batch` is 1 for want of a fixed one.
    """

    roles: Mapping[str, Role]
    inputs: tuple[ValueInfo, ...]
    caches: tuple[CacheInput, ...]
    batch: int
    length: int | None
    free_batch: bool

    def make_feeds(self, ids: Array, caches: Arrays | None = None) -> dict[str, Array]:
        """Make the inputs for tokens. ids: integers [N, T]. caches: of the tokens before, by input; None: no tokens."""
        held = self.make_empty_caches() if caches is None else caches
        known = next((held[one.value.name].shape[one.axis] for one in self.caches), 0)
        rows, count = ids.shape
        made: dict[Role, Callable[[ValueInfo], Array]] = {
            Role.CACHE: lambda value: held[value.name],
            Role.BRANCH: lambda value: np.full(len(value.shape or ()) * (1,), known > 0),
            Role.KEPT: lambda value: np.zeros(len(value.shape or ()) * (1,)),
            Role.MASK: lambda _: np.ones((rows, known + count)),
            Role.POSITIONS: lambda value: np.broadcast_to(
                np.arange(known, known + count), (rows, count)[-len(value.shape or ()) :]
            ),
            Role.SENTENCE: lambda _: np.zeros((rows, count)),
            Role.IDS: lambda _: ids,
        }
        return {
            value.name: np.array(made[self.roles[value.name]](value), find_input_dtype(value), order="C")
            for value in self.inputs
        }

    def make_empty_caches(self, rows: int | None = None) -> dict[str, Array]:
        """Caches of no tokens, by input. rows: of the tokens; None for `batch`."""
        empty = {}
        for one in self.caches:
            shape = [dim if isinstance(dim, int) else rows or self.batch for dim in one.value.shape or ()]
            shape[one.axis] = 0
            empty[one.value.name] = np.zeros(shape, find_input_dtype(one.value))
        return empty

    def read_caches(self, outputs: Arrays) -> dict[str, Array]:
        """Caches for the next tokens, by input, from the outputs of a run."""
        return {one.value.name: outputs[one.output] for one in self.caches}

    def run_prompt(self, session: Session, ids: Array) -> dict[str, Array]:
        """Run tokens [N, T], in steps where the model takes only so many; returns the caches behind them."""
        caches = self.make_empty_caches()
        step = self.length or ids.shape[1]
        for start in range(0, ids.shape[1], step):
            feeds = self.make_feeds(ids[:, start : start + step], caches)
            caches = self.read_caches(session.run(feeds, [one.output for one in self.caches]))
        return caches


def find_text_inputs(inputs: Sequence[ValueInfo], outputs: Sequence[str]) -> TextInputs:
    """Find the role of every input. outputs: names of the model's.

    Raises DataError for an input that tokens do not give, and for caches of one fixed length.
    """
    whole = [value for value in inputs if _is_integer(value) and len(value.shape or ()) == 2]
    roles: dict[str, Role] = {}
    for value in inputs:
        role = next((role for part, role in _NAMES if part in value.name.lower()), None)
        if role is None and whole == [value]:
            role = Role.IDS
        if role is None or len(value.shape or ()) not in _RANKS[role] or (role is Role.IDS and not _is_integer(value)):
            cause = f"no text gives its values ({format_shape(value)})"
            raise _make_error(value, cause, "give samples with all inputs, e.g. as .npz")
        roles[value.name] = role
    ids = [value for value in inputs if roles[value.name] is Role.IDS]
    if len(ids) != 1:
        cause = f"the model has {len(ids)} inputs for tokens"
        names = ", ".join(value.name for value in inputs)
        raise DataError("text", cause, f"give samples with all inputs, e.g. as .npz ({names})", code="Q223")
    batch, length = ids[0].shape or (None, None)
    held = [value for value in inputs if roles[value.name] is Role.CACHE]
    caches = [CacheInput(value, name, _find_axis(value, batch)) for value, name in _pair_caches(held, outputs)]
    return TextInputs(
        roles, tuple(inputs), tuple(caches), batch if isinstance(batch, int) else 1,
        length if isinstance(length, int) else None, not isinstance(batch, int),
    )  # fmt: skip


def _make_error(value: ValueInfo, cause: str, fix: str) -> DataError:
    return DataError(f"input {value.name!r}", cause, fix, code="Q223")


def _is_integer(value: ValueInfo) -> bool:
    dtype = find_input_dtype(value)
    return dtype is not None and classify_dtype(dtype) == "int"


def _pair_caches(caches: Sequence[ValueInfo], outputs: Sequence[str]) -> list[tuple[ValueInfo, str]]:
    """The output that continues each cache: of the same layer and part by its name, else in the order of both."""
    made = [name for name in outputs if "present" in name.lower()] or list(outputs[1:])
    named = {_PREFIXES.sub("", name.lower()): name for name in made}
    found = [named.get(_PREFIXES.sub("", value.name.lower())) for value in caches]
    if all(name is not None for name in found):
        return [(value, str(name)) for value, name in zip(caches, found, strict=True)]
    if len(made) != len(caches):
        cause = f"the model has {len(caches)} caches and {len(made)} outputs that could continue them"
        raise _make_error(caches[0], cause, "give samples with all inputs, e.g. as .npz")
    return list(zip(caches, made, strict=True))


def _find_axis(value: ValueInfo, batch: int | str | None) -> int:
    """The axis of the tokens: the only one of no fixed size beside that of the samples."""
    dims = value.shape or ()
    free = [
        axis for axis, dim in enumerate(dims)
        if not isinstance(dim, int) and not (dim == batch if dim is not None else axis == 0)
    ]  # fmt: skip
    free = [axis for axis in free if "batch" not in str(dims[axis])] if len(free) > 1 else free
    if len(free) != 1:
        cause = f"caches grow along one axis, and this one has {len(free)} of no fixed size ({format_shape(value)})"
        raise _make_error(value, cause, "export the model with a symbol for the length of its caches")
    return free[0]


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
