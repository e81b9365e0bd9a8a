"""Patterns of names, and the short forms of values."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from onnxq.config import Observer, matches_any
from onnxq.config.values import Files, Seconds, Section, Size, Words, wrap_pairs
from onnxq.spec import ObserverSpec

CASES = [
    ("conv*", "conv_1", True),
    ("conv*", "my_conv_1", False),
    ("*conv*", "my_conv_1", True),
    ("Conv", "conv", False),
    ("/conv$/", "my_conv", True),
    ("/conv$/", "conv_1", False),
    ("/^(Conv|Gemm)$/", "Gemm", True),
    ("/encoder/*", "/encoder/layer.0/MatMul", True),
    ("/encoder/*", "x/encoder/layer.0", False),
    ("features[0]", "features[0]", True),
    ("features[0]", "features0", True),
    ("conv_?", "conv_1", True),
]


@pytest.mark.parametrize(("pattern", "name", "selected"), CASES)
def test_globs_cover_the_whole_name_and_regexes_any_part(pattern, name, selected):
    assert matches_any(pattern, name) is selected


@given(st.text(min_size=1).filter(lambda s: not (len(s) > 2 and s.startswith("/") and s.endswith("/"))))
def test_every_name_selects_itself(name):
    assert matches_any(name, name)


class Part(Section):
    names: Words = ()
    files: Files = ()
    pairs: tuple[tuple[int, int], ...] = ()
    size: Size | None = None
    time: Seconds | None = None
    observer: Observer = ObserverSpec()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"names": "a"}, Part(names=("a",))),
        ({"names": ["a", "b"]}, Part(names=("a", "b"))),
        ({"files": Path("a/b")}, Part(files=("a/b",))),
        ({"files": ["a", Path("b")]}, Part(files=("a", "b"))),
        ({"files": "caf\udce9"}, Part(files=("caf\udce9",))),  # a name that is not UTF-8
        ({"files": [3]}, None),
        ({"size": 5}, Part(size=5)),
        ({"size": "2 KiB"}, Part(size=2048)),
        ({"size": "1e3"}, None),
        ({"size": "0.5"}, None),
        ({"size": 2.5}, None),
        ({"time": 2}, Part(time=2.0)),
        ({"time": ".5m"}, Part(time=30.0)),
        ({"time": "1h30"}, None),
        ({"time": 0}, None),
        ({"time": float("nan")}, None),
        ({"names": 3}, None),
        ({"names": {"a": 1}}, None),
        ({"other": 1}, None),
    ],
)
def test_short_forms(given: dict[str, object], found: Part | None) -> None:
    if found is None:
        with pytest.raises(ValidationError):
            Part.model_validate(given)
    else:
        assert Part.model_validate(given) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("mse", ObserverSpec("mse")),
        ({"name": "mse"}, ObserverSpec("mse")),
        ({"steps": 3, "name": "mse", "k": True}, ObserverSpec("mse", (("k", True), ("steps", 3)))),
        (ObserverSpec("aciq"), ObserverSpec("aciq")),
    ],
)
def test_an_observer_is_a_name_or_a_mapping(given: object, found: ObserverSpec) -> None:
    part = Part.model_validate({"observer": given})
    assert part.observer == found
    # Its form in YAML, which is read back as the same.
    assert Part.model_validate(part.model_dump()).observer == found
    assert part.model_dump()["observer"] == (
        {"name": found.name, **dict(found.options)} if found.options else found.name
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "must be the name of an observer, or a mapping with `name`"),
        ({}, "a mapping with `name`"),
        ({"name": 3}, "a mapping with `name`"),
        ({"name": "mse", "x": [1]}, "option 'x' must be a number, a word or true/false, not list"),
        ({"name": "mse", "x": float("inf")}, "not one that is not finite"),
        ({"name": "mse", "x": 10**400}, "not one so large"),
        ({"name": "mse", 3: 1}, "option '3' must be a number, a word or true/false, not named by a number"),
    ],
)
def test_an_observer_that_is_none(given: object, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        Part.model_validate({"observer": given})


@pytest.mark.parametrize(
    ("given", "pairs"),
    [
        ((), ()),
        (["int8", "Conv*"], (("int8", "Conv*"),)),
        ([["int8", "Conv*"], ["float16", "MatMul*"]], (("int8", "Conv*"), ("float16", "MatMul*"))),
        ((("int8", "Conv*"),), (("int8", "Conv*"),)),
        ("int8", "int8"),
    ],
)
def test_a_pair_alone_is_one_of_pairs(given: object, pairs: object) -> None:
    assert wrap_pairs(given) == pairs
