"""Inputs of a language model, and texts that it writes itself."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from onnxq.arrays import Array, Arrays, as_float64, as_int64
from onnxq.data.fit import Feeds, Inputs, classify_input, find_input_dtype, format_shape, is_integer
from onnxq.errors import DataError, OnnxqError
from onnxq.graph import ValueInfo, ValueInfos
from onnxq.runtime import Session


class InputRole(Enum):
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
    ("past", InputRole.CACHE),
    ("use_cache", InputRole.BRANCH),
    ("logits_to_keep", InputRole.KEPT),
    ("mask", InputRole.MASK),
    ("position", InputRole.POSITIONS),
    ("token_type", InputRole.SENTENCE),
    ("segment", InputRole.SENTENCE),
    ("ids", InputRole.IDS),
    ("tokens", InputRole.IDS),
)
# Ranks that each role may have; of a mask 2, since those of scores are exporters' own.
_RANKS = {
    InputRole.CACHE: (3, 4, 5),
    InputRole.BRANCH: (0, 1),
    InputRole.KEPT: (0, 1),
    InputRole.MASK: (2,),
    InputRole.POSITIONS: (1, 2),
    InputRole.SENTENCE: (2,),
    InputRole.IDS: (2,),
}
# Of the name of a cache, what its input and its output have in common.
_PREFIXES = re.compile(r"past_key_values?|present_key_values?|past|present")


@dataclass(frozen=True)
class CacheInput:
    """One cache. output: name of the output that continues it. axis: of the tokens; None for a ring, always as long."""

    value: ValueInfo
    output: str
    axis: int | None


@dataclass(frozen=True)
class TextInputs:
    """The inputs of a model by their roles, and its caches.

    batch, length: of the tokens; None for any length. free_batch: True where `batch` is 1 for want of a fixed one.
    """

    roles: Mapping[str, InputRole]
    inputs: ValueInfos
    caches: tuple[CacheInput, ...]
    batch: int
    length: int | None
    free_batch: bool

    def make_feeds(self, ids: Array, caches: Arrays | None = None) -> Feeds:
        """Make the inputs for tokens. ids: integers [N, T]. caches: of the tokens before, by input; None: no tokens."""
        caches = self.make_empty_caches() if caches is None else caches
        known = self.count_known(caches)
        rows, count = ids.shape
        feeds = {}
        for value in self.inputs:
            rank = value.rank
            array: Array
            match self.roles[value.name]:
                case InputRole.CACHE:
                    array = caches[value.name]
                # Decoders of two branches in one file: for a prompt, and for a step on caches.
                case InputRole.BRANCH:
                    array = np.full(rank * (1,), known > 0)
                # 0 keeps the logits of all tokens.
                case InputRole.KEPT:
                    array = np.zeros(rank * (1,))
                case InputRole.MASK:
                    array = np.ones((rows, known + count))
                case InputRole.POSITIONS:
                    array = np.broadcast_to(np.arange(known, known + count), ids.shape[-rank:])
                case InputRole.SENTENCE:
                    array = np.zeros(ids.shape)
                case InputRole.IDS:
                    array = ids
            feeds[value.name] = np.array(array, find_input_dtype(value), order="C")
        return feeds

    def make_empty_caches(self, rows: int | None = None) -> Feeds:
        """Caches of no tokens, by input. rows: of the tokens; None for `batch`."""
        empty = {}
        for cache in self.caches:
            value = cache.value
            shape = [dim if isinstance(dim, int) else rows or self.batch for dim in value.dims]
            if cache.axis is not None:
                shape[cache.axis] = 0
            empty[value.name] = np.zeros(shape, find_input_dtype(value))
        return empty

    def read_caches(self, outputs: Arrays) -> Feeds:
        """Caches for the next tokens, by input, from the outputs of a run."""
        caches = {cache.value.name: outputs[cache.output] for cache in self.caches}
        for cache in self.caches:
            if cache.axis is None:
                # What no token has reached yet is memory that nobody wrote.
                caches[cache.value.name][:, :, self.count_known(caches) :] = 0
        return caches

    def count_known(self, caches: Arrays) -> int:
        """The tokens that caches hold."""
        lengths = (
            caches[cache.value.name].shape[cache.axis]
            for cache in self.caches
            if cache.axis is not None
        )
        return next(lengths, 0)

    def run_prompt(self, session: Session, ids: Array) -> Feeds:
        """Run tokens [N, T], in steps where the model takes only so many; returns the caches behind them."""
        caches = self.make_empty_caches()
        step = self.length or ids.shape[1]
        outputs = [cache.output for cache in self.caches]
        for start in range(0, ids.shape[1], step):
            feeds = self.make_feeds(ids[:, start : start + step], caches)
            caches = self.read_caches(session.run(feeds, outputs))
        return caches

    def takes_several(self, session: Session) -> bool:
        """True where several tokens may follow caches: some masks are made for prompts, and for one token behind them.

        Such masks are not told apart by their inputs, so that two tokens are run behind one.
        """
        ids = np.zeros((self.batch, 2), np.int64)
        try:
            session.run(self.make_feeds(ids, self.run_prompt(session, ids[:, :1])))
        except OnnxqError:
            return False
        return True


def find_text_inputs(inputs: Inputs, outputs: Sequence[str]) -> TextInputs:
    """Find the role of every input. outputs: names of the model's.

    Raises DataError for an input that tokens do not give, and for caches of one fixed length.
    """
    whole = [value for value in inputs if is_integer(value) and value.rank == 2]
    roles = {}
    for value in inputs:
        role = next((role for part, role in _NAMES if part in value.name.lower()), None)
        if role is None and whole == [value]:
            role = InputRole.IDS
        if (
            role is None
            or value.rank not in _RANKS[role]
            or (role is InputRole.IDS and not is_integer(value))
        ):
            cause = f"no text gives its values ({format_shape(value)})"
            raise _make_error(value, cause, "give samples with all inputs, e.g. as .npz")
        roles[value.name] = role
    ids = [value for value in inputs if roles[value.name] is InputRole.IDS]
    if len(ids) != 1:
        cause = f"the model has {len(ids)} inputs for tokens"
        names = ", ".join(value.name for value in inputs)
        raise DataError(
            "text", cause, f"give samples with all inputs, e.g. as .npz ({names})", code="Q223"
        )
    batch, length = ids[0].shape or (None, None)
    pairs = _pair_caches(
        [value for value in inputs if roles[value.name] is InputRole.CACHE], outputs
    )
    caches = tuple(CacheInput(value, output, _find_axis(value, batch)) for value, output in pairs)
    if caches and all(cache.axis is None for cache in caches):
        raise _make_axis_error(pairs[0][0], 0)
    return TextInputs(
        roles=roles,
        inputs=tuple(inputs),
        caches=caches,
        batch=batch if isinstance(batch, int) else 1,
        length=length if isinstance(length, int) else None,
        free_batch=not isinstance(batch, int),
    )


def _make_error(value: ValueInfo, cause: str, fix: str) -> DataError:
    return DataError(f"input {value.name!r}", cause, fix, code="Q223")


def _pair_caches(caches: Inputs, outputs: Sequence[str]) -> list[tuple[ValueInfo, str]]:
    """The output that continues each cache: of the same layer and part by its name, else in the order of both."""
    presents = [name for name in outputs if "present" in name.lower()] or list(outputs[1:])
    by_stem = {_PREFIXES.sub("", name.lower()): name for name in presents}
    stems = [_PREFIXES.sub("", value.name.lower()) for value in caches]
    if all(stem in by_stem for stem in stems):
        presents = [by_stem[stem] for stem in stems]
    elif len(presents) != len(caches):
        cause = f"the model has {len(caches)} caches and {len(presents)} outputs that could continue them"
        raise _make_error(caches[0], cause, "give samples with all inputs, e.g. as .npz")
    return list(zip(caches, presents, strict=True))


def _find_axis(value: ValueInfo, batch: int | str | None) -> int | None:
    """The axis of the tokens: the only one of no fixed size beside that of the samples; None without one."""
    dims = value.dims
    free = [
        axis
        for axis, dim in enumerate(dims)
        if not isinstance(dim, int) and (axis > 0 if dim is None else dim != batch)
    ]
    free = [axis for axis in free if "batch" not in str(dims[axis])] if len(free) > 1 else free
    if len(free) > 1:
        raise _make_axis_error(value, len(free))
    return free[0] if free else None


def _make_axis_error(value: ValueInfo, count: int) -> DataError:
    cause = f"caches grow along one axis, and this one has {count} of no fixed size ({format_shape(value)})"
    return _make_error(value, cause, "export the model with a symbol for the length of its caches")


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
        raise make_decoder_error(
            "the model", f"takes {parts.length} tokens at a time, so that it cannot write a text"
        )
    rng = np.random.default_rng(seed)
    missing = count * parts.batch
    # A fixed batch is filled by each run.
    rows = min(missing, _ROWS) if parts.free_batch else parts.batch
    tokens = tokens or _count_tokens(session, parts, name, rows)
    # One token at least is written behind the special ones.
    start = np.tile(as_int64(prefix[: length - 1]), (rows, 1))
    while missing > 0:
        texts = _write_rows(session, parts, name, start, length, tokens, rng)[:missing]
        missing -= len(texts)
        yield from texts.reshape(-1, parts.batch, length)


def _write_rows(
    session: Session,
    parts: TextInputs,
    name: str,
    ids: Array,
    length: int,
    tokens: int,
    rng: np.random.Generator,
) -> Array:
    """Texts that begin with `ids`, integers [rows, length]. name: of the logits."""
    caches = parts.make_empty_caches(len(ids)) if parts.caches else None
    known = 0
    # Of the first token nothing is asked but that there is such a one.
    drawn = rng.integers(0, tokens, len(ids))
    while True:
        ids = np.concatenate([ids, drawn[:, None]], axis=1)
        if ids.shape[1] >= length:
            return ids
        new = ids[:, known:]
        if caches is None and parts.length is not None:
            # No token sees those behind it.
            new = np.pad(new, ((0, 0), (0, parts.length - new.shape[1])))
        at = ids.shape[1] - known - 1
        outputs = session.run(parts.make_feeds(new, caches))
        if caches is not None:
            caches = parts.read_caches(outputs)
            known = ids.shape[1]
        logits = outputs[name]
        # Models that give the last position alone are asked for nothing else.
        drawn = _draw_tokens(logits[:, min(at, logits.shape[1] - 1), :tokens], rng)


def _count_tokens(session: Session, parts: TextInputs, name: str, rows: int) -> int:
    """The size of the vocabulary, by a run of one token."""
    ids = np.zeros((rows, parts.length or 1), np.int64)
    caches = parts.make_empty_caches(rows) if parts.caches else None
    return int(session.run(parts.make_feeds(ids, caches), [name])[name].shape[-1])


def _draw_tokens(logits: Array, rng: np.random.Generator) -> Array:
    """One token for each row of logits."""
    wide = as_float64(logits)
    shares = np.exp(wide - wide.max(axis=-1, keepdims=True)).cumsum(axis=-1)
    drawn = rng.random((len(shares), 1)) * shares[:, -1:]
    return np.asarray((drawn >= shares).sum(axis=-1)).clip(0, shares.shape[-1] - 1)


def make_decoder_error(name: str, cause: str) -> DataError:
    """The error for a model that does not predict the next token."""
    return DataError(
        name, cause, "give a decoder that predicts the next token at every position", code="Q225"
    )


def find_logits(outputs: Inputs, parts: TextInputs, name: str) -> str:
    """The output of logits: called so, or the first of rank 3 that is no cache. name: of the model, for messages.

    Raises DataError where there is none.
    """
    caches = {cache.output for cache in parts.caches}
    able = [
        value
        for value in outputs
        if value.rank == 3 and value.name not in caches and classify_input(value) in ("", "float")
    ]
    if not able:
        raise make_decoder_error(name, "has no output of floats [samples, tokens, vocabulary]")
    return next((value.name for value in able if "logits" in value.name.lower()), able[0].name)
