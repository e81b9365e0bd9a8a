"""JSON validated by a schema before use: plans, proofs, notes in models. Faults name file, line and path.

A schema is a `Frozen` with fields of the types below, so that other rooms need no pydantic.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from onnxq.config.document import Path, Schema, format_path, join_faults, list_faults, shorten_value
from onnxq.errors import ErrorClass, Location, OnnxqError
from onnxq.sites import JsonObject, Settings

_Row = TypeVar("_Row", bound=BaseModel)
# Further faults of one file that a message lists.
_LISTED = 5
# pydantic's JSON parser gives the position of a fault only in its text.
_LINE = re.compile(r" at line (\d+) column \d+")
# A string, a bracket, comma or colon, or another value.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)


class Loose(BaseModel):
    """Frozen and strict about types; unknown keys are ignored. For files of which onnxq reads a part."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def _read_site_name(value: Any) -> Any:
    match value:
        case str():
            return value
        case [str(node), int(k)] if 0 <= k < _MANY and not isinstance(k, bool):
            return node, k
    raise ValueError("must be a tensor's name, or [node, number of its input]")


# Bounds that keep numbers inside the integers of numpy and ONNX; ranks and opsets stay far below them.
_MANY = 2**31
Finite = Annotated[float, Field(allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0, lt=_MANY)]
Level = Annotated[int, Field(ge=-_MANY, lt=2 * _MANY)]
Width = Annotated[int, Field(ge=0, le=64)]
# Code of an error, a refusal or a warning, never empty.
Code = Annotated[str, Field(min_length=1)]
Axis = Annotated[int, Field(ge=-64, lt=64)]
Opset = Annotated[int, Field(ge=1, lt=1000)]
Words = Annotated[dict[str, str], Field(default_factory=dict)]
SiteName = Annotated[Any, BeforeValidator(_read_site_name)]
SchemaNumber = Annotated[Natural, Field(alias="schema")]
# The name of the file, where it is empty or not there.
Origin = Annotated[
    str, AfterValidator(lambda text, info: text or info.context), Field(validate_default=True)
]
PassName = Annotated[str, Field(alias="pass", min_length=1)]


def _refuse_repeats(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
    out = {}
    for key, value in pairs:
        if key in out:
            raise _Repeated(key)
        out[key] = value
    return out


class _Repeated(Exception):
    """A key stands twice in one object."""


@dataclass(frozen=True)
class JsonText:
    """JSON from a file."""

    # The file's name, for messages.
    source: str
    text: str

    def where(self, path: Path) -> Location:
        """`file:line: dotted.path` of an entry, with the line of the innermost part that exists."""
        return Location(self.source, find_line(self.text, path), format_path(path))

    def parse(self, error: ErrorClass, fix: str, *, code: str = "") -> Any:
        """Parse to plain values. Raises `error`, with `code`, for text that is no JSON, too deep, or repeats a key."""
        try:
            # pydantic's parser is strict about NaN and depth and names the line; json alone sees repeated keys.
            from_json(self.text)
            return json.loads(self.text, object_pairs_hook=_refuse_repeats)
        except _Repeated as repeated:
            cause = f"gives {shorten_value(str(repeated))} twice in one object"
            raise error(self.source, cause, "keep one", code=code) from repeated
        except (ValueError, RecursionError) as found:
            line = _LINE.search(str(found))
            cause = str(found).splitlines()[0][:200].replace(line[0] if line else "\n", "")
            where = Location(self.source, int(line[1]) if line else 1)
            raise error(where, f"not JSON: {cause}", fix, code=code) from found

    def read(self, schema: type[_Row], error: ErrorClass, fix: str, *, code: str = "") -> _Row:
        """Parse to `schema`; `parse` must have accepted the text.

        Raises `error`, with `code`, naming line and path of entries that do not fit. fix: where to get another file.
        """
        try:
            return schema.model_validate_json(self.text, strict=True)
        except ValidationError as found:
            raise self.locate(found, schema, error, fix, code) from found

    def locate(
        self,
        failure: ValidationError,
        schema: Schema,
        error: ErrorClass,
        fix: str,
        code: str,
    ) -> OnnxqError:
        """Make one `error` of all faults of `schema`, each with its line and path."""
        faults = [(self.where(fault.path), fault) for fault in list_faults(failure, schema)]
        return join_faults(faults, error, fix, code=code, most=_LISTED)


def check_values(values: Settings, schema: type[_Row], subject: str, error: ErrorClass) -> _Row:
    """Convert plain values to `schema`. Raises `error` about `subject` for entries that do not fit."""
    try:
        return schema.model_validate(dict(values), strict=True)
    except ValidationError as found:
        faults = [
            (Location(subject, within=format_path(fault.path)), fault)
            for fault in list_faults(found, schema)
        ]
        raise join_faults(faults, error, most=_LISTED) from found


def find_line(text: str, path: Path) -> int:
    """Find the line, from 1, of the value at `path` in well-formed JSON; of the innermost part of `path` that exists.

    Called for messages only; values that fit need no positions.
    """
    # The path of the token, with "" where the next key of an object follows.
    at: list[str | int] = []
    key = False
    best = 0
    depth = 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word in "]}":
            at.pop()
            key = False
        elif word == ",":
            # In an object a key follows, in a list the next item.
            key = isinstance(at[-1], str)
            if not key:
                at[-1] = int(at[-1]) + 1
        elif word != ":":
            if key and word != "{":
                at[-1] = json.loads(word)
                key = False
            if depth < len(at) <= len(path) and tuple(at) == path[: len(at)]:
                best = token.start()
                depth = len(at)
            if word in "[{":
                at.append(0 if word == "[" else "")
                key = word == "{"
    return text.count("\n", 0, best) + 1
