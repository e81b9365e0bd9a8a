"""Language models side by side on a text: perplexity, agreement with the first, tokens a second."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from onnxq.arrays import Array
from onnxq.data.fit import Inputs
from onnxq.data.text import Window, find_text_inputs
from onnxq.data.text.generate import find_logits, make_decoder_error
from onnxq.errors import DataError
from onnxq.progress import Progress
from onnxq.runtime import Session
from onnxq.runtime.timing import count_block_runs, measure_rounds, summarize_rounds, time_runs
from onnxq.wording import show_as_summary

Caches = dict[str, Array]
# Logits of one model held at a time: 64 MB of float32.
_BLOCK = 2**24
# Beyond it a float overflows.
_MOST_NATS = 700.0
# Positions in a block before the vocabulary is known: few enough for any.
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class LanguageScore:
    """One model.

    size: bytes of its files. agreement: share of positions at which it finds the same token likeliest as the first
    model. divergence: mean Kullback-Leibler divergence of its distribution from the first model's, in nats.
    generated: tokens, on average over prompts, before the first one that differs from the first model's; None: not
    asked for. prompt, generation: tokens a second, of a window in one run and of one token behind half a window; None:
    not timed. caches: False where each token of a generation costs a run of all before it.
    """

    name: str
    size: int
    perplexity: float
    bits_per_byte: float
    agreement: float
    divergence: float
    caches: bool
    generated: float | None = None
    prompt: float | None = None
    generation: float | None = None


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Models on one text, the first of which others are compared with.

    tokens: predicted, in all windows. length: tokens of a window. prompts: that texts were generated after, of
    `generate` tokens each. data: name of the text. device: kind of CPU, or the provider.
    """

    models: tuple[LanguageScore, ...]
    windows: int
    tokens: int
    length: int
    prompts: int
    generate: int
    threads: int
    device: str
    data: str


class Decoder:
    """A session that reads tokens and gives logits. name: for messages. inputs: by default the session's.

    Raises DataError for a model that tokens do not feed, or that gives no logits.
    """

    def __init__(self, session: Session, name: str, inputs: Inputs | None = None) -> None:
        self.session = session
        self.name = name
        names = [value.name for value in session.outputs]
        self.parts = find_text_inputs(inputs or session.inputs, names)
        self._logits = find_logits(session.outputs, self.parts, name)

    @property
    def caches(self) -> bool:
        """True where keys and values of the tokens before go in and come out."""
        return bool(self.parts.caches)

    @cached_property
    def _takes_several(self) -> bool:
        return self.parts.takes_several(self.session)

    def run_tokens(self, ids: Array, caches: Caches | None = None) -> tuple[Array, Caches]:
        """Run tokens [T] behind those of the caches: float32 logits [T, vocabulary], and the caches behind them.

        Raises DataError where the model has no token of that number, or gives other logits.
        """
        count = len(ids)
        fixed = self.parts.length
        step = fixed or (1 if caches and count > 1 and not self._takes_several else count)
        if count > step:
            parts = []
            behind = caches
            for start in range(0, count, step):
                logits, behind = self.run_tokens(ids[start : start + step], behind)
                parts.append(logits)
            return np.concatenate(parts), behind or {}
        # No token sees those behind it, so that any number may fill up what has one length.
        row = ids if fixed is None else np.pad(ids, (0, fixed - count))
        outputs = self.session.run(
            self.parts.make_feeds(np.repeat(row[None], self.parts.batch, 0), caches)
        )
        logits = outputs[self._logits]
        if logits.ndim != 3 or logits.shape[1] != len(row):
            cause = f"its output {self._logits!r} is {list(logits.shape)} for {len(row)} tokens"
            raise make_decoder_error(self.name, cause)
        return logits[0, :count].astype(np.float32), self.parts.read_caches(outputs)

    def read_logits(self, ids: Array, rows: int) -> Iterator[Array]:
        """Logits of a text [T] in blocks of `rows` positions; with caches, of which each needs the memory of one."""
        if not self.caches:
            logits, _ = self.run_tokens(ids)
            yield from (logits[start : start + rows] for start in range(0, len(ids), rows))
            return
        caches = None
        for start in range(0, len(ids), rows):
            logits, caches = self.run_tokens(ids[start : start + rows], caches)
            yield logits

    def generate_tokens(self, prompt: Array, count: int) -> list[int]:
        """Continue a text by `count` tokens, each the likeliest one."""
        tokens = []
        logits, caches = self.run_tokens(prompt)
        while True:
            tokens.append(int(np.argmax(logits[-1])))
            if len(tokens) == count:
                return tokens
            if self.caches:
                logits, caches = self.run_tokens(np.array(tokens[-1:]), caches)
            else:
                logits, _ = self.run_tokens(np.concatenate([prompt, tokens]))


@dataclass
class _PositionSums:
    """Sums over positions of one model."""

    nats: float = 0.0
    same: int = 0
    divergence: float = 0.0


@dataclass
class TextErrors:
    """Sums over windows of every model."""

    sums: dict[str, _PositionSums] = field(default_factory=dict)
    windows: int = 0
    tokens: int = 0
    size: float = 0.0
    rows: int = _ROWS

    def add_window(self, decoders: Sequence[Decoder], window: Window) -> None:
        """Run a window in all models, block by block. Raises DataError where vocabularies differ."""
        ids = window.ids
        # The last token predicts nothing here.
        streams = [decoder.read_logits(ids[:-1], self.rows) for decoder in decoders]
        start = 0
        for blocks in zip(*streams, strict=True):
            self._add_block(decoders, blocks, ids[start + 1 : start + 1 + len(blocks[0])])
            start += len(blocks[0])
        self.rows = max(1, _BLOCK // blocks[0].shape[1])
        self.windows += 1
        self.tokens += start
        self.size += window.size

    def _add_block(
        self, decoders: Sequence[Decoder], blocks: Sequence[Array], targets: Array
    ) -> None:
        first = blocks[0]
        reference = _compute_log_softmax(first)
        likeliest = first.argmax(-1)
        chances = np.exp(reference)
        largest = int(targets.max())
        for decoder, logits in zip(decoders, blocks, strict=True):
            size = logits.shape[1]
            if logits.shape != first.shape:
                cause = f"gives {size} logits, and {decoders[0].name} {first.shape[1]}"
                raise DataError(
                    decoder.name, cause, "compare models of one vocabulary", code="Q225"
                )
            if largest >= size:
                cause = f"the model has {size} tokens, and the text token {largest}"
                fix = "give the tokenizer that belongs to the model with `tokenizer=…`"
                raise DataError(decoder.name, cause, fix, code="Q223")
            logs = reference if logits is first else _compute_log_softmax(logits)
            sums = self.sums.setdefault(decoder.name, _PositionSums())
            sums.nats -= float(logs[np.arange(len(targets)), targets].sum(dtype=np.float64))
            sums.same += int((logits.argmax(-1) == likeliest).sum())
            # Kullback-Leibler: Σ p · (log p - log q), with p of the first model.
            sums.divergence += float((chances * (reference - logs)).sum(dtype=np.float64))


def _compute_log_softmax(logits: Array) -> Array:
    """Logarithms of probabilities along the last axis."""
    # No exponential overflows then.
    shifted = logits - logits.max(-1, keepdims=True)
    out: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out


def sum_errors(decoders: Sequence[Decoder], windows: Iterable[Window]) -> TextErrors:
    """Run all windows of a text in all models. Raises DataError for a text without two tokens."""
    errors = TextErrors()
    for window in windows:
        if len(window.ids) > 1:
            errors.add_window(decoders, window)
    if not errors.tokens:
        raise DataError(
            "text", "has no token that another one predicts", "give a longer text", code="Q224"
        )
    return errors


def describe_errors(errors: TextErrors, name: str) -> dict[str, float]:
    """Perplexity, bits a byte, agreement and divergence of one model, by the names of LanguageScore."""
    sums = errors.sums[name]
    mean = sums.nats / errors.tokens
    # Bytes of all tokens of a window but the first, which nothing predicts.
    shown = errors.size * errors.tokens / (errors.tokens + errors.windows)
    return {
        # Infinite where a model gives the text next to no chance.
        "perplexity": math.exp(mean) if mean < _MOST_NATS else math.inf,
        "bits_per_byte": sums.nats / math.log(2) / shown,
        "agreement": sums.same / errors.tokens,
        "divergence": sums.divergence / errors.tokens,
    }


def compare_texts(
    decoders: Sequence[Decoder], prompts: Sequence[Array], count: int, progress: Progress
) -> dict[str, float]:
    """Generate `count` tokens after each prompt; tokens of each model, on average, that are the first model's."""
    wanted: list[list[int]] = []
    shares = {}
    with progress("generating", len(decoders) * len(prompts)) as task:
        for decoder in decoders:
            alike = 0
            for k, prompt in enumerate(prompts):
                tokens = decoder.generate_tokens(prompt, count)
                if len(wanted) == k:
                    wanted.append(tokens)
                pairs = zip(tokens, wanted[k], strict=True)
                alike += next((n for n, (a, b) in enumerate(pairs) if a != b), count)
                task.advance()
            shares[decoder.name] = alike / len(prompts)
    return shares


def time_decoders(
    decoders: Sequence[Decoder], ids: Array, seconds: float
) -> tuple[dict[str, float], ...]:
    """Tokens a second of each model, (of a prompt, of generation), timed side by side.

    ids: of a window. seconds: for each of the two, at most.
    """
    half = max(len(ids) // 2, 1)
    prompts = {}
    steps = {}
    for decoder in decoders:
        prompts[decoder.name] = partial(time_runs, partial(decoder.run_tokens, ids))
        # Without caches a token costs a run of all that stand before it.
        known = decoder.run_tokens(ids[:half])[1] if decoder.caches else None
        step = ids[half : half + 1] if decoder.caches else ids[: half + 1]
        steps[decoder.name] = partial(time_runs, partial(decoder.run_tokens, step, known))
    rates = []
    for blocks, tokens in ((prompts, len(ids)), (steps, 1)):
        repeated = {name: partial(block, count_block_runs(block)) for name, block in blocks.items()}
        times = measure_rounds(repeated, seconds=seconds)
        rates.append(
            {
                name: 1e3 * tokens / summarize_rounds(rounds).median_ms
                for name, rounds in times.items()
            }
        )
    return tuple(rates)
