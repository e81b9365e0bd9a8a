"""A model that predicts the next token, run on prompts and token by token, with its caches where it has some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.text import TextInputs, find_text_inputs
from onnxq.data.text.generate import find_logits, make_decoder_error
from onnxq.runtime import Session

Array = NDArray[Any]
Caches = dict[str, Array]


class Decoder:
    """A session that reads tokens and gives logits. name: for messages.

    Raises DataError for a model that tokens do not feed, or that gives no logits.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        self.parts: TextInputs = find_text_inputs(session.inputs, [value.name for value in session.outputs])
        self._logits = find_logits(session.outputs, self.parts, name)

    @property
    def caches(self) -> bool:
        """True where keys and values of the tokens before go in and come out."""
        return bool(self.parts.caches)

    def run_tokens(self, ids: Array, caches: Caches | None = None) -> tuple[Array, Caches]:
        """Run tokens [T] behind those of the caches: float32 logits [T, vocabulary], and the caches behind them.

        Raises DataError where the model has no token of that number, or gives other logits.
        """
        count, fixed = len(ids), self.parts.length
        if fixed is not None and count > fixed:
            parts, held = [], caches
            for start in range(0, count, fixed):
                logits, held = self.run_tokens(ids[start : start + fixed], held)
                parts.append(logits)
            return np.concatenate(parts), held or {}
        # No token sees those behind it, so that any number may fill up what has one length.
        row = ids if fixed is None else np.pad(ids, (0, fixed - count))
        outputs = self.session.run(self.parts.make_feeds(np.repeat(row[None], self.parts.batch, 0), caches))
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
        caches: Caches | None = None
        for start in range(0, len(ids), rows):
            logits, caches = self.run_tokens(ids[start : start + rows], caches)
            yield logits

    def generate_tokens(self, prompt: Array, count: int) -> list[int]:
        """Continue a text by `count` tokens, each the likeliest one."""
        found: list[int] = []
        logits, caches = self.run_tokens(prompt)
        while True:
            found.append(int(np.argmax(logits[-1])))
            if len(found) == count:
                return found
            if self.caches:
                logits, caches = self.run_tokens(np.array(found[-1:]), caches)
            else:
                logits, _ = self.run_tokens(np.concatenate([prompt, found]))
