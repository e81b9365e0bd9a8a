"""JSON by schema and of dataclasses: what is read and written, and that every fault names file, line and path."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from onnxq.config import Frozen, Observer, schema
from onnxq.config.document import Fault, join_faults
from onnxq.config.rows import Form, Written, read_fields, write_fields
from onnxq.config.schema import JsonText, Natural
from onnxq.errors import ConfigError, DataError, Location, PlanError
from onnxq.sites import Code
from onnxq.spec import ObserverSpec

FIX = "write another"


class Row(Frozen):
    name: str
    count: schema.Natural = 0
    scale: schema.Finite = 1.0


class File(Frozen):
    number: schema.SchemaNumber
    rows: tuple[Row, ...] = ()
    site: schema.SiteName = ""
    notes: schema.Words


class Part(schema.Loose):
    name: str
    axis: schema.Axis = 0


def test_the_line_of_an_entry_of_json() -> None:
    text = '{\n "a": [1,\n {"b": "}, \\"", "c": []},\n {"b":\n  [[], {},\n 7]}],\n "d": 1\n}'
    found = {
        path: schema.find_line(text, path) for path in [("a",), ("a", 1), ("a", 2, "b", 2), ("d",), ("a", 9), ("e",)]
    }
    assert list(found.values()) == [2, 3, 6, 7, 2, 1]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def list_places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in list_places(one, (*path, key)))]


@given(values)
def test_the_line_of_any_entry_is_the_one_it_stands_in(value: Any) -> None:
    """With a line for each entry, entries come in the order of their lines."""
    text = json.dumps({"all": value}, indent=1)
    places = list_places({"all": value})
    lines = [schema.find_line(text, place) for place in places]
    assert lines == sorted(lines)
    assert len(set(lines)) == len(lines)


def test_text_is_read_into_its_schema() -> None:
    text = '{"schema": 2, "rows": [{"name": "a", "scale": 0.5}], "site": ["n", 1], "notes": {"k": "v"}}'
    source = schema.JsonText("p.json", text)
    assert source.parse(PlanError, FIX)["rows"][0]["name"] == "a"
    found = source.read(File, PlanError, FIX)
    assert (found.number, found.rows, found.site, found.notes) == (2, (Row(name="a", scale=0.5),), ("n", 1), {"k": "v"})


@pytest.mark.parametrize(
    ("text", "place", "cause"),
    [
        ("{", "p.json:1", "not JSON: EOF"),
        ('{"a": 1,\n oops}', "p.json:2", "not JSON: "),
        ('{"a": 1, "a": 2}', "p.json", "gives 'a' twice in one object"),
        ("[" * 5000, "p.json:1", "not JSON: recursion limit"),
    ],
    ids=["cut", "word", "twice", "deep"],
)
def test_text_that_is_no_json_is_refused_with_its_line(text: str, place: str, cause: str) -> None:
    with pytest.raises(PlanError) as caught:
        schema.JsonText("p.json", text).parse(PlanError, FIX, code="Q401")
    assert caught.value.subject == place
    assert caught.value.cause.startswith(cause)
    assert caught.value.code == "Q401"


@pytest.mark.parametrize(
    ("text", "place", "cause"),
    [
        ('{"schema": 1,\n "rwos": []}', "p.json:2: rwos", "unknown key 'rwos'"),
        ('{"schema": 1,\n "rows": [{"name": "a"},\n {"name": 3}]}', "p.json:3: rows[1].name", "must be a valid string"),
        ('{"schema": 1,\n "rows": [\n{"count": 1, "name": "a"},\n{}]}', "p.json:4: rows[1].name", "is missing"),
        ('{"schema": -1}', "p.json:1: schema", "must be greater than or equal to 0"),
        ('{"schema": 1,\n\n "rows": [{"name": "a", "count": 3000000000}]}', "p.json:3: rows[0].count", "must be less"),
        (
            '{"schema": 1, "rows": [{"name": "a", "scale": 1e999}]}',
            "p.json:1: rows[0].scale",
            "must be a finite number",
        ),
        ('{"schema": 1, "site": ["n"]}', "p.json:1: site", "must be a tensor's name, or [node, number of its input]"),
        ('{"schema": 1, "site": ["n", true]}', "p.json:1: site", "must be a tensor's name"),
        ('{"schema": 1, "notes": {"k": 3}}', "p.json:1: notes.k", "must be a valid string"),
        ("[]", "p.json:1", "must be a mapping of keys to values"),
    ],
)
def test_what_does_not_fit_the_schema_names_line_and_path(text: str, place: str, cause: str) -> None:
    with pytest.raises(PlanError) as caught:
        schema.JsonText("p.json", text).read(File, PlanError, FIX, code="Q402")
    assert caught.value.subject == place
    assert caught.value.cause.startswith(cause)
    assert caught.value.fix.endswith(", or write another")
    assert caught.value.code == "Q402"


def test_unknown_keys_are_passed_over_where_a_part_is_read() -> None:
    found = schema.JsonText("x", '{"name": "a", "more": [1], "axis": -3}').read(Part, DataError, "")
    assert (found.name, found.axis) == ("a", -3)
    with pytest.raises(DataError, match="axis"):
        schema.JsonText("x", '{"name": "a", "axis": 64}').read(Part, DataError, "")


class Plain(Frozen):
    observer: Observer = ObserverSpec()
    opset: schema.Opset = 13
    code: schema.Code = "Q300"
    by: schema.PassName = Field(default="none", alias="pass")


def test_plain_values_are_checked_too() -> None:
    found = schema.check_values({"observer": {"name": "mse", "steps": 4}, "opset": 17}, Plain, "a note", DataError)
    assert (found.observer, found.opset) == (ObserverSpec("mse", (("steps", 4),)), 17)
    with pytest.raises(DataError) as caught:
        schema.check_values({"opset": 0, "code": ""}, Plain, "a note", DataError)
    assert caught.value.subject == "a note: opset"
    assert caught.value.details[0].startswith("also a note: code: ")


def test_many_faults_are_one_error_that_lists_some() -> None:
    faults = [
        (Location("f", line), Fault(("a",), f"cause {line}", "mend it" if line == 1 else "")) for line in range(1, 10)
    ]
    error = join_faults(faults, PlanError, "take another", code="Q402", most=5)
    assert (error.subject, error.cause, error.line) == ("f:1", "cause 1", 1)
    assert error.fix == "mend it, or take another"
    assert error.details[0] == "also f:2: cause 2; correct it here"
    assert error.details[-1] == "and 3 more"
    assert join_faults(faults[1:2], PlanError).fix == "correct it here"


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
class Piece:
    size: Natural
    code: Code = "A1"


@dataclass(frozen=True)
class Whole:
    place: Annotated[Place, Form(_PlaceRow, _read_place, _write_place, flat=True)]
    name: str
    note: Written[str] = ""
    color: Color = Color.RED
    parts: tuple[Piece, ...] = ()
    pair: tuple[Natural, Natural | None] | None = None
    by_name: Mapping[str, Piece] = field(default_factory=dict)
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
    assert whole.parts == (Piece(1), Piece(2, "B2"))
    assert whole.pair == (4, None)
    assert whole.by_name == {"a": Piece(3)}
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
