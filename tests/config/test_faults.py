"""Faults in the words of people: path, cause, the nearest name, a fix."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import ValidationError

from onnxq.config import Config
from onnxq.config.document import Fault, list_choices, list_faults, list_models, shorten_value, suggest_key
from onnxq.config.rules import Rule, TensorConfig


def faults(**values: object) -> list[Fault]:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(values, strict=True)
    return list_faults(caught.value, Config, {Config: frozenset({"source"})})


@pytest.mark.parametrize(
    ("values", "path", "cause", "fix", "code"),
    [
        ({"effrot": "fast"}, ("effrot",), "unknown key 'effrot'", "did you mean 'effort'?", "Q303"),
        ({"effort": "fats"}, ("effort",), "'fats' is not one of fast, balanced, high", "did you mean 'fast'?", "Q304"),
        ({"bias": 3}, ("bias",), "3 is not one of int32, float", "write one of them, numbers without quotes", "Q304"),
        ({"rules": ({"op": ("*",)},)}, ("rules", 0, "set"), "is missing", "add it", "Q304"),
        ({"data": {"samples": 0}}, ("data", "samples"), "must be greater than or equal to 1, not 0", "", "Q304"),
        (
            {"weights": {"granularity": "block"}},
            ("weights",),
            "granularity 'block' needs a block_size",
            "",
            "Q304",
        ),
    ],
)
def test_a_fault(values: dict[str, object], path: tuple[object, ...], cause: str, fix: str, code: str) -> None:
    assert faults(**values) == [Fault(path, cause, fix, code)]


def test_all_faults_are_listed() -> None:
    assert [fault.path for fault in faults(effort="fats", bias="int16")] == [("bias",), ("effort",)]


def test_a_key_is_suggested_where_it_belongs() -> None:
    assert suggest_key(Config, "block_size") == "write it under `activations`"
    assert suggest_key(TensorConfig, "symetric") == "did you mean `scheme: symmetric`?"
    assert suggest_key(None, "anything") == "remove it"
    assert "'source'" not in suggest_key(Config, "sourc", {Config: frozenset({"source"})})
    assert "'node'" in suggest_key(Rule, "nod")


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "'x'"), (1.5, "1.5"), ("y" * 100, "'" + "y" * 56 + "..."), (10**5000, "a number of thousands of digits")],
    ids=["word", "float", "long", "huge"],
)
def test_values_fit_a_line(value: object, text: str) -> None:
    assert shorten_value(value) == text


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"target": 3}, "must be a valid string, not 3"),
        ({"skip": 1.5}, "must be a list, not 1.5"),
        ({"data": [1]}, "must be a mapping of keys to values"),
        ({"data": {"samples": 1.5}}, "must be a valid integer, not 1.5"),
        ({"data": {"samples": "x" * 99}}, "must be a valid integer, not '" + "x" * 56 + "..."),
        ({"verify": {"latency": None}}, "must be a valid boolean, not None"),
        ({"weight_bits_budget": float("inf")}, "must be a finite number, not inf"),
        ({"weight_bits_budget": 1}, "must be greater than or equal to 2, not 1"),
        ({"weight_bits": [4, 9]}, "9 is not one of 2, 3, 4, 5, 6, 7, 8, 16"),
        ({"rules": [{"set": {"bits": 4}}]}, "selects nothing; give node, op, tensor, role, scope or between"),
        ({"runtime": {"libraries": [None]}}, "must be a path, not None"),
        ({"x" * 99: 1}, "unknown key '" + "x" * 56 + "..."),
    ],
)
def test_every_kind_of_fault_has_words_of_its_own(values: dict[str, object], cause: str) -> None:
    (fault,) = faults(**values)
    assert fault.cause == cause


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("observer", "write it under `activations`"),
        ("samples", "write it under `"),
        ("effrt", "did you mean 'effort'?"),
        ("weight_onyl", "did you mean 'weights' or 'weight_bits'"),
        ("zzz", "known: accuracy, accuracy_level, activations"),
    ],
)
def test_the_fix_of_an_unknown_key(key: str, said: str) -> None:
    (fault,) = faults(**{key: 1})
    assert fault.fix.startswith(said)
    assert fault.code == "Q303"


def test_words_and_models_of_a_type() -> None:
    assert list_choices(Literal["a", "b"] | None) == ["a", "b"]
    assert list_choices(tuple[Literal["a", 3], ...]) == ["a", 3]
    assert list_choices(int) == []
    assert list(list_models(tuple[Rule, ...] | None)) == [Rule]
    assert list(list_models(dict[str, TensorConfig])) == [TensorConfig]
    assert list(list_models(int)) == []
