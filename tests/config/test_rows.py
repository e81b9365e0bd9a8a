"""Dataclasses as JSON: keys of their fields, defaults left out, other forms, and faults at their place."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest

from onnxq.config import Frozen
from onnxq.config.rows import Form, Written, read_fields, write_fields
from onnxq.config.schema import JsonText, Natural
from onnxq.errors import ConfigError, PlanError
from onnxq.sites import Code


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


class _PlaceRow(Frozen):
    street: str
    number: Natural = 0


@dataclass(frozen=True)
class Place:
    text: str


def _read_place(row: Any) -> Place:
    if row.number == 13:
        raise ConfigError("number 13", "there is none", "take 14")
    return Place(f"{row.street} {row.number}")


def _write_place(owner: Any) -> dict[str, Any]:
    street, number = owner.place.text.split()
    return {"street": street, "number": int(number)}


@dataclass(frozen=True)
class Part:
    size: Natural
    code: Code = "A1"


@dataclass(frozen=True)
class Whole:
    place: Annotated[Place, Form(_PlaceRow, _read_place, _write_place, flat=True)]
    name: str
    note: Written[str] = ""
    color: Color = Color.RED
    parts: tuple[Part, ...] = ()
    pair: tuple[Natural, Natural | None] | None = None
    by_name: Mapping[str, Part] = field(default_factory=dict)
    square: Annotated[int, Form(int, lambda x: x * x, lambda x: round(x**0.5))] = 0


def read(raw: Any) -> Whole:
    text = JsonText("w.json", raw if isinstance(raw, str) else json.dumps(raw, indent=1))
    return read_fields(text, Whole, PlanError, "")


BARE = {"street": "Main", "number": 3, "name": "w", "note": ""}
FULL = BARE | {
    "color": "blue",
    "parts": [{"size": 1, "code": "A1"}, {"size": 2, "code": "B2"}],
    "pair": [4, None],
    "by_name": {"a": {"size": 3, "code": "A1"}},
    "square": 5,
}


@pytest.mark.parametrize("raw", [BARE, FULL])
def test_what_is_written_reads_back(raw: dict[str, Any]) -> None:
    whole = read(raw)
    assert json.loads(json.dumps(write_fields(whole))) == raw
    assert list(write_fields(whole)) == list(raw)
    assert read(write_fields(whole)) == whole


def test_values_have_the_types_of_the_fields() -> None:
    assert read(BARE) == Whole(Place("Main 3"), "w")
    whole = read(FULL)
    assert whole.color is Color.BLUE
    assert whole.parts == (Part(1), Part(2, "B2"))
    assert whole.pair == (4, None)
    assert whole.by_name == {"a": Part(3)}
    assert whole.square == 25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": [{"size": 1}, {"size": -1}]}, "parts[1].size: must be greater than or equal to 0, not -1"),
        ({"parts": [{"size": 1, "code": ""}]}, "parts[0].code: "),
        ({"parts": [{"siz": 1, "size": 2}]}, "did you mean 'size'"),
        ({"parts": 3}, "parts: must be a list, not 3"),
        ({"color": "rde"}, "did you mean 'red'"),
        ({"number": 13}, "w.json:1: number 13: there is none"),
        ({"name": None}, "name: must be a valid string, not None"),
        ({"square": "x"}, "square: must be a valid integer"),
    ],
)
def test_a_fault_names_its_entry(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        read(BARE | change)


@pytest.mark.parametrize("missing", ["name", "street"])
def test_what_must_be_there_is_missed(missing: str) -> None:
    with pytest.raises(PlanError, match=f"{missing}: is missing"):
        read({key: value for key, value in BARE.items() if key != missing})
