"""Faults in the words of people: path, cause, the nearest name, a fix."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from onnxq.config import Config
from onnxq.config.faults import Fault, list_faults, shorten_value, suggest_key
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
