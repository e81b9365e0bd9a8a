"""The order of promotions: what gains most for its cost first, all in float only where nothing else helps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onnxq.passes.mixed_precision.candidates import PromotionCandidate
from onnxq.passes.mixed_precision.search import PromotionSearch

NOISE = {"a": 8.0, "b": 7.0, "c": 2.0, "d": 1.0}


class _ScriptedSearch(PromotionSearch):
    """Noises add up, each operator costs as much as the next, and behind some of them the others no longer pay."""

    def __init__(self, leaves_nothing: frozenset[str]) -> None:
        self.as_run = False
        self.leaves_nothing = leaves_nothing
        candidates = tuple(PromotionCandidate(name, frozenset([name])) for name in NOISE)
        self.ways: Any = SimpleNamespace(list_candidates=lambda: candidates)

    def is_float(self, keys: frozenset[str]) -> bool:
        return keys >= self.leaves_nothing

    def list_promoted(self, keys: frozenset[str]) -> tuple[str, ...]:
        return tuple(NOISE) if self.is_float(keys) else tuple(sorted(keys))

    def _find_cost(self, keys: frozenset[str]) -> float:
        # All in float have no pairs left that cost anything.
        return 0.0 if self.is_float(keys) else float(len(keys))

    def _measure_noises(self, settings: list[frozenset[str]]) -> list[float]:
        return [sum(NOISE.values()) - sum(NOISE[name] for name in self.list_promoted(keys)) for keys in settings]

    def _make_step(self, keys: frozenset[str], wider: frozenset[str], name: str) -> Any:
        return name, self.is_float(wider)


@pytest.mark.parametrize(
    ("leaves_nothing", "steps"),
    [
        ("abcd", ["a", "b", "c", "d!"]),
        # With both of the loudest in float nothing else pays: the quiet ones may do before that.
        ("ab", ["a", "c", "d", "b!"]),
        ("a", ["b", "c", "d", "a!"]),
    ],
)
def test_all_in_float_comes_last(leaves_nothing: str, steps: list[str]) -> None:
    search = _ScriptedSearch(frozenset(leaves_nothing))
    found: list[Any] = list(search.find_steps())
    assert [name + "!" * whole for name, whole in found] == steps
