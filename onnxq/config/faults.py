"""Faults found by pydantic, with onnxq's texts: path, cause, nearest name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from onnxq.config.document import Path
from onnxq.errors import OnnxqError
from onnxq.nearest import find_nearest, suggest_names

# Keys that are set by onnxq and not by people, by their model: never suggested.
Hidden = Mapping[type[BaseModel], frozenset[str]]
# The fix of a fault that has none of its own.
CORRECT = "correct it here"
# Characters of a wrong value that a message repeats.
_SHOWN = 60


@dataclass(frozen=True)
class Fault:
    """One wrong entry of a document."""

    path: Path
    cause: str
    # "" if there is no better advice than to correct the entry.
    fix: str = ""
    # Entry of `onnxq.codes` for a configuration.
    code: str = "Q304"


def list_faults(error: ValidationError, root: type[BaseModel], hidden: Hidden | None = None) -> list[Fault]:
    """List every fault of a document that was validated as `root`."""
    return [_describe_fault(details, root, hidden or {}) for details in error.errors(include_url=False)]


def _describe_fault(details: ErrorDetails, root: type[BaseModel], hidden: Hidden) -> Fault:
    path, kind, value = tuple(details["loc"]), details["type"], details["input"]
    if kind == "extra_forbidden":
        key = str(path[-1])
        return Fault(
            path, f"unknown key {shorten_value(key)}", suggest_key(_find_model(root, path[:-1]), key, hidden), "Q303"
        )
    if kind in ("literal_error", "enum"):
        choices = str(details.get("ctx", {}).get("expected", ""))
        known = [part.strip("' ") for part in choices.replace(" or ", ", ").split(", ")]
        close = find_nearest(value, known) if isinstance(value, str) and value not in known else ()
        fix = f"did you mean {close[0]!r}?" if close else "write one of them, numbers without quotes"
        return Fault(path, f"{shorten_value(value)} is not one of {', '.join(known)}", fix)
    if kind == "missing":
        return Fault(path, "is missing", "add it")
    if kind == "value_error":  # raised by our own validators, in our own words
        error = details["ctx"]["error"]
        if isinstance(error, OnnxqError):
            return Fault(path, f"{error.subject}: {error.cause}", error.fix)
        return Fault(path, str(error))
    words = {"tuple_type": "must be a list", "model_type": "must be a mapping of keys to values"}
    message = words.get(kind, str(details["msg"]).replace("Input should be", "must be"))
    if value is None or isinstance(value, (str, int, float, bool)):
        message += f", not {shorten_value(value)}"
    return Fault(path, message)


def shorten_value(value: object) -> str:
    """Format a value as Python writes it, cut to one line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def suggest_key(owner: type[BaseModel] | None, key: str, hidden: Hidden | None = None) -> str:
    """Suggest the nearest key. For a word that resembles a value (`symetric`) suggest that key and value."""
    if owner is None:
        return "remove it"
    secret = (hidden or {}).get(owner, frozenset())
    fields = {f.alias or name: f for name, f in owner.model_fields.items() if name not in secret}
    for name, field in fields.items():
        if any(key in inner.model_fields for inner in list_models(field.annotation)):
            return f"write it under `{name}`"
    if not find_nearest(key, fields):
        words = {str(word): name for name, f in fields.items() for word in list_choices(f.annotation) if word}
        for word in find_nearest(key, words, limit=1):
            return f"did you mean `{words[word]}: {word}`?"
    return suggest_names(key, fields)


def _find_model(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Find the model whose keys stand at `path`; None for none."""
    owner: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        field = None if owner is None else _find_field(owner, part)
        owner = None if field is None else next(list_models(field), None)
    return owner


def _find_field(owner: type[BaseModel], key: str) -> Any:
    for name, field in owner.model_fields.items():
        if key == (field.alias or name):
            return field.annotation
    return None


def list_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that the type of a field is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from list_models(part)


def list_choices(annotation: Any) -> list[str | int]:
    """List the words and numbers that the type of a field allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in list_choices(part)]
