"""Texts that a decoder writes, its caches fed back, and how well it foretells a text."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from tests.decoders.text import encode_text
from tests.fuzz.judge import open_session

Array = NDArray[Any]
_KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Player:
    """A session of a decoder with caches, in whatever layout."""

    def __init__(self, model: onnx.ModelProto | Path, *, optimize: bool = True) -> None:
        self.session = open_session(model, optimize=optimize)
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def make_caches(self, batch: int = 1) -> dict[str, Array]:
        caches = {name: value for name, value in self.inputs.items() if name.startswith("past")}
        return {
            name: np.zeros((batch, value.shape[1], 0, value.shape[3]), _KINDS[value.type])
            for name, value in caches.items()
        }

    def feed(self, ids: Array, caches: dict[str, Array]) -> dict[str, Array]:
        """The feeds for some tokens behind those of the caches."""
        past = next(iter(caches.values())).shape[2]
        feeds = {"input_ids": ids, "attention_mask": np.ones((len(ids), past + ids.shape[1]), np.int64), **caches}
        if "position_ids" in self.inputs:
            feeds["position_ids"] = np.tile(np.arange(past, past + ids.shape[1]), (len(ids), 1))
        if "use_cache_branch" in self.inputs:
            feeds["use_cache_branch"] = np.array([past > 0])
        return feeds

    def step(self, ids: Array, caches: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Logits, and the caches with these tokens."""
        made = dict(zip(self.outputs, self.session.run(None, self.feed(ids, caches)), strict=True))
        logits = made.pop("logits").astype(np.float32)
        return logits, {name.replace("present", "past_key_values"): value for name, value in made.items()}

    def generate(self, prompt: Array, count: int = 50) -> Array:
        """The tokens that are likeliest, one after another."""
        logits, caches = self.step(prompt, self.make_caches())
        found = []
        for _ in range(count):
            found.append(logits[:, -1:].argmax(-1))
            logits, caches = self.step(found[-1], caches)
        return np.concatenate(found, axis=1)

    def measure_perplexity(self, prompt: int = 16) -> float:
        """Of the text behind a prompt, token by token through the caches."""
        ids = encode_text()[:, :112]
        logits, caches = self.step(ids[:, :prompt], self.make_caches())
        losses = []
        for k in range(prompt, ids.shape[1]):
            row = logits[0, -1].astype(np.float64)
            losses.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[0, k]])
            logits, caches = self.step(ids[:, k : k + 1], caches)
        return float(np.exp(np.mean(losses)))


def make_samples(player: Player, count: int = 8, length: int = 24, more: int = 8) -> list[dict[str, Array]]:
    """Prompts, each followed by some tokens with the prompt's caches, as a decoder is used."""
    text, samples = encode_text(), []
    for k in range(count // 2):
        start = 31 * k % (text.shape[1] - length - more)
        ids, empty = text[:, start : start + length], player.make_caches()
        samples.append(player.feed(ids, empty))
        _, caches = player.step(ids, empty)
        samples.append(player.feed(text[:, start + length : start + length + more], caches))
    return samples
