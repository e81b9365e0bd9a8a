"""What every configuration type is made of: the frozen base, words, patterns and the observer's short form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer
from pydantic_core import PydanticCustomError

from onnxq.spec import ObserverSpec

Bits = Literal[2, 3, 4, 5, 6, 7, 8, 16]
Scheme = Literal["symmetric", "asymmetric"]
Grain = Literal["tensor", "channel", "block"]
_LARGEST = 1e300
Storage = Literal["", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float8e4m3fn"]


class Frozen(BaseModel):
    """Frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def one_or_many(value: Any) -> Any:
    """A single word or a list, as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def check_options(kind: str, options: Mapping[Any, Any]) -> None:
    """PydanticCustomError, a fault of a field, for an option of an observer or a quantizer that is no plain value."""
    for key, option in options.items():
        unfit = type(option).__name__ if not isinstance(option, (bool, int, float, str)) else ""
        if isinstance(option, (int, float)) and not abs(option) < _LARGEST:  # NaN is not below it either
            unfit = "one that is not finite" if isinstance(option, float) else "one so large"
        if unfit or not isinstance(key, str):
            raise PydanticCustomError(
                kind,
                "option '{key}' must be a number, a word or true/false, not {kind}",
                {"key": str(key), "kind": unfit or "named by a number"},
            )


def _observer(value: Any) -> Any:
    if isinstance(value, str):
        return ObserverSpec(value)
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise PydanticCustomError("observer", "an observer is a name, or a mapping with `name` and its options")
    check_options("observer", options)
    return ObserverSpec(name, tuple(sorted(options.items())))


def plain_observer(spec: ObserverSpec) -> Any:
    """The observer as it is written in YAML."""
    return {"name": spec.name, **dict(spec.options)} if spec.options else spec.name


Observer = Annotated[ObserverSpec, BeforeValidator(_observer), PlainSerializer(plain_observer)]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str] | None:
    written = len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/")
    return re.compile(pattern[1:-1]) if written else None


def matches(patterns: str | Sequence[str], name: str) -> bool:
    """True when one of the patterns selects `name`, or when there are none.

    `/…/` is a regular expression that may match anywhere; everything else is a glob over the whole name,
    case-sensitive. A pattern equal to the name always matches, so names with brackets can be written as they are.
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not wanted:
        return True
    for pattern in wanted:
        regex = _regex(pattern)
        if pattern == name or (regex.search(name) is not None if regex else fnmatchcase(name, pattern)):
            return True
    return False


def checked_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns, if none is empty and every regular expression compiles; else ValueError."""
    for pattern in value:
        if not pattern:
            raise ValueError("a pattern must not be empty")
        try:
            _regex(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern[:60]!r} is not a regular expression: {error}") from error
    return value


Patterns = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]
