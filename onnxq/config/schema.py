"""JSON checked by a schema before anyone uses it: plans, proofs, notes in models. Faults name file, line and path.

A schema is a `Frozen` with the types below; its rooms need no pydantic of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from onnxq.config.document import Path, dotted
from onnxq.config.faults import Fault, list_faults, shorten
from onnxq.errors import Location, OnnxqError

_Row = TypeVar("_Row", bound=BaseModel)
# Most faults told of one file.
_TOLD = 5
_LINE = re.compile(r" at line (\d+) column \d+")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)


class Loose(BaseModel):
    """Frozen and strict about types, but with other keys beside those it asks for: files that say more than is read."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def _site_name(value: Any) -> Any:
    node = isinstance(value, (list, tuple)) and len(value) == 2
    whole = node and isinstance(value[0], str) and isinstance(value[1], int) and not isinstance(value[1], bool)
    if not isinstance(value, str) and not (whole and 0 <= value[1] < _MANY):
        raise ValueError("must be a tensor's name, or [node, number of its input]")
    return value if isinstance(value, str) else (value[0], value[1])


_MANY = 2**31
Finite = Annotated[float, Field(allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0, lt=_MANY)]
Level = Annotated[int, Field(ge=-_MANY, lt=2 * _MANY)]
Width = Annotated[int, Field(ge=0, le=64)]
Axis = Annotated[int, Field(ge=-64, lt=64)]
Opset = Annotated[int, Field(ge=1, lt=1000)]
Words = Annotated[dict[str, str], Field(default_factory=dict)]
SiteName = Annotated[Any, BeforeValidator(_site_name)]
SchemaNumber = Annotated[Natural, Field(alias="schema")]
PassName = Annotated[str, Field(alias="pass", min_length=1)]


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Repeated(key)
        out[key] = value
    return out


class _Repeated(Exception):
    """A key given twice in one object."""


@dataclass(frozen=True)
class JsonText:
    """JSON from a file. source: its name, for messages."""

    source: str
    text: str

    def where(self, path: Path) -> Location:
        """`file:line: dotted.path` of an entry, with the line of the innermost part that is there."""
        return Location(self.source, find_line(self.text, path), dotted(path))

    def parse(self, error: type[OnnxqError], fix: str, *, code: str = "") -> Any:
        """Plain values. Raises `error`, with `code`, for what is no JSON, nested too deeply, or gives a key twice."""
        try:
            from_json(self.text)
            return json.loads(self.text, object_pairs_hook=_no_repeats)
        except _Repeated as repeated:
            cause = f"gives {shorten(str(repeated))} twice in one object"
            raise error(self.source, cause, "keep one", code=code) from repeated
        except (ValueError, RecursionError) as found:
            line = _LINE.search(str(found))
            cause = str(found).splitlines()[0][:200].replace(line[0] if line else "\n", "")
            where = Location(self.source, int(line[1]) if line else 1)
            raise error(where, f"not JSON: {cause}", fix, code=code) from found

    def read(self, schema: type[_Row], error: type[OnnxqError], fix: str, *, code: str = "") -> _Row:
        """The content as `schema`. Raises `error`, with `code`, naming line and path of what does not fit.

        fix: where to get another file.

        Only what `parse` accepts should come here.
        """
        try:
            return schema.model_validate_json(self.text, strict=True)
        except ValidationError as found:
            faults = list_faults(found, schema)
            raise explain([(self.where(one.path), one) for one in faults], error, fix, code) from found


def check_values(values: Mapping[str, Any], schema: type[_Row], subject: str, error: type[OnnxqError]) -> _Row:
    """Plain values as `schema`; raises `error` about `subject` for what does not fit."""
    try:
        return schema.model_validate(dict(values), strict=True)
    except ValidationError as found:
        faults = [(Location(subject, within=dotted(one.path)), one) for one in list_faults(found, schema)]
        raise explain(faults, error, "") from found


def explain(faults: list[tuple[Location, Fault]], error: type[OnnxqError], fix: str, code: str = "") -> OnnxqError:
    """One error for all faults, each with its place. fix: added where a fault has no better one."""
    (subject, first), rest = faults[0], faults[1:]
    more = "".join(f"\n  also {other}: {one.cause}; {one.fix}" for other, one in rest[:_TOLD])
    more += f"\n  and {len(rest) - _TOLD} more" if len(rest) > _TOLD else ""
    own = f"{first.fix}, or {fix}" if fix else first.fix
    return error(subject, first.cause, own + more, code=code)


def find_line(text: str, path: Path) -> int:
    """The line, from 1, on which the value at `path` begins in well-formed JSON; of its nearest holder if not there."""
    at: list[str | int] = []  # the path of the token, with "" where an object's next key is to come
    key, best, depth = False, 0, 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word in "]}":
            at.pop()
            key = False
        elif word == ",":
            key = isinstance(at[-1], str)
            if not key:
                at[-1] = int(at[-1]) + 1
        elif word != ":":
            if key and word != "{":
                at[-1], key = json.loads(word), False
            if depth < len(at) <= len(path) and tuple(at) == path[: len(at)]:
                best, depth = token.start(), len(at)
            if word in "[{":
                at.append(0 if word == "[" else "")
                key = word == "{"
    return text.count("\n", 0, best) + 1


__all__ = [
    "Axis",
    "Finite",
    "JsonText",
    "Level",
    "Loose",
    "Natural",
    "Opset",
    "PassName",
    "Path",
    "SchemaNumber",
    "SiteName",
    "Width",
    "Words",
    "check_values",
    "find_line",
    "shorten",
]  # fmt: skip
