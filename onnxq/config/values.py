"""Building blocks of the configuration types: the frozen base, words, patterns, the short form of observers."""

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
Storage = Literal["", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float8e4m3fn"]
# The largest float is 1.8e308; an integer beyond it cannot become one.
_LARGEST = 1e300


class Frozen(BaseModel):
    """A frozen model that is strict about types and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def wrap_word(value: Any) -> Any:
    """Convert a single word or a list to a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def check_options(kind: str, options: Mapping[Any, Any]) -> None:
    """Raise PydanticCustomError, a fault of a field, for an option of an observer or quantizer that is not plain."""
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


def _read_observer(value: Any) -> Any:
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


def format_observer(spec: ObserverSpec) -> Any:
    """Convert an observer to its form in YAML."""
    return {"name": spec.name, **dict(spec.options)} if spec.options else spec.name


Observer = Annotated[ObserverSpec, BeforeValidator(_read_observer), PlainSerializer(format_observer)]


# Every rule is matched against every node, and re's own cache holds 512 patterns.
@lru_cache(maxsize=4096)
def _compile_pattern(pattern: str) -> re.Pattern[str] | None:
    written = len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/")
    return re.compile(pattern[1:-1]) if written else None


def matches_any(patterns: str | Sequence[str], name: str) -> bool:
    """True if one of the patterns selects `name`, or if there are none.

    `/…/` is a regular expression that may match anywhere; any other pattern is a glob over the whole name,
    case-sensitive. A pattern equal to the name always matches, so names with brackets need no escapes.
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not wanted:
        return True
    for pattern in wanted:
        regex = _compile_pattern(pattern)
        if pattern == name or (regex.search(name) is not None if regex else fnmatchcase(name, pattern)):
            return True
    return False


def check_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns. Raises ValueError if one is empty or a regular expression does not compile."""
    for pattern in value:
        if not pattern:
            raise ValueError("a pattern must not be empty")
        try:
            _compile_pattern(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern[:60]!r} is not a regular expression: {error}") from error
    return value


Patterns = Annotated[tuple[str, ...], BeforeValidator(wrap_word)]
