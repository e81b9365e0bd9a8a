"""Building blocks of the configuration types: the frozen base, options, words, amounts, patterns, observers."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Flag, auto
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from onnxq.sites import JsonObject, Names, drop_repeats
from onnxq.spec import ObserverSpec

Extent = Annotated[float, Field(ge=0)]
# 32 is that of biases, which follows from their input and weight.
Bits = Literal[2, 3, 4, 5, 6, 7, 8, 16]
Scheme = Literal["symmetric", "asymmetric"]
Grain = Literal["tensor", "channel", "block"]
Storage = Literal[
    "", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float8e4m3fn"
]
# The lowest and the highest value of a range.
Ends = tuple[float, float]
HighPrecision = Literal["float16", "bfloat16", "float32"]
# The preset and the target where nothing is said. Presets are named after their target.
DEFAULT_PRESET = "ort-int8"
DEFAULT_TARGET = DEFAULT_PRESET.partition("-")[0]
# The largest float is 1.8e308; an integer beyond it cannot become one.
_LARGEST = 1e300


class Frozen(BaseModel):
    """A frozen model that is strict about types and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


ModelT = TypeVar("ModelT", bound=BaseModel)


def change_fields(model: ModelT, **fields: Any) -> ModelT:
    """The model with other values in these fields, which are not validated."""
    return model.model_copy(update=fields)


class Command(Flag):
    """Commands, and the Python functions behind them, that an option can be given to."""

    QUANTIZE = auto()
    PLAN = auto()
    APPLY = auto()
    IMPORT = auto()
    DIFF = auto()
    PROVE = auto()
    PROFILE = auto()
    ANNOTATE = auto()
    BENCH = auto()
    VARIANTS = auto()
    PERPLEXITY = auto()
    REPORT = auto()
    SEARCH = auto()
    CONVERT = auto()
    IMPORT_WEIGHTS = auto()


# The commands that make a quantized model of a float one.
MAKING = Command.QUANTIZE | Command.SEARCH


class Section(Frozen):
    """A part of the configuration. Takes lists, as YAML has them, for tuples."""

    # Of its options, where they name none of their own.
    commands: ClassVar[Command] = Command(0)

    @model_validator(mode="before")
    @classmethod
    def _take_lists(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }


def option(
    default: Any,
    text: str,
    commands: Command | None = None,
    *,
    name: str = "",
    flags: str = "",
    metavar: str = "",
    bare: str = "",
    code: bool = False,
    names: str = "",
    **bounds: Any,
) -> Any:
    """Make a field that commands take as an option, and Python functions as an override.

    text: for --help. commands: None for those of the section. name: for overrides, "" for the field's own. flags: of
    the command line, without dashes; "" for the name, less "_out", with "no-" in front where the default is True.
    metavar: the value in --help. bare: the value where the flag stands alone; "": it must have one. code: its value
    names code that is run. names: the registry of `onnxq.backends` that lists its values. bounds: ge, gt, le, as of
    pydantic's Field.
    """
    extra: JsonObject = {
        "commands": commands,
        "name": name,
        "flags": flags,
        "metavar": metavar,
        "bare": bare,
        "code": code,
        "names": names,
    }
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def wrap_single(value: Any) -> Any:
    """Convert a single word, path or number to a tuple."""
    return (value,) if isinstance(value, (str, int, os.PathLike)) else value


def wrap_pairs(value: Any) -> Any:
    """Convert a pair of words to a tuple of pairs, and pairs in lists to tuples."""
    if not isinstance(value, (list, tuple)):
        return value
    # A single pair: its parts are words, those of several are pairs.
    pairs = (value,) if value and all(isinstance(part, str) for part in value) else value
    return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)


def split_words(value: Any) -> Any:
    """Convert "a,b" to a tuple, each word once."""
    if not isinstance(value, str):
        return value
    return drop_repeats(word.strip() for word in value.split(",") if word.strip())


def join_words(value: Any) -> Any:
    """Convert a list of words to "a,b", without blanks."""
    if isinstance(value, (list, tuple)):
        # An unquoted list in YAML, or one of Python.
        value = ",".join(map(str, value))
    return "".join(value.split()) if isinstance(value, str) else value


# Bytes of each unit of memory ("KiB" and its like count by 1024), and seconds of each unit of time.
_POWERS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_BYTES = {f"{unit}{byte}": count for unit, count in _POWERS.items() for byte in ("", "B")}
_SECONDS = {"": 1, "S": 1, "M": 60, "H": 3600}
# Bytes, or seconds, more than anybody has.
_MOST = 2.0**62


def _read_amount(units: Mapping[str, int], otherwise: str) -> BeforeValidator:
    """Convert a number with its unit, as text, to the number of single units. otherwise: the message for other text."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Z]*)", value.strip().upper())
        # An unknown unit makes 0, which is refused.
        amount = float(match[1]) * units.get(match[2], 0) if match else 0.0
        if not 0 < amount < _MOST:
            raise ValueError(f"{value!r} is {otherwise}")
        return int(amount) if amount.is_integer() else amount

    return BeforeValidator(read)


Size = Annotated[
    int, _read_amount(_BYTES, "no amount of memory; write it as 512MB, 2GB or 1.5GiB"), Field(ge=1)
]
Seconds = Annotated[
    float, _read_amount(_SECONDS, "no time; write it as 90s, 10m or 1.5h"), Field(gt=0)
]
Words = Annotated[tuple[str, ...], BeforeValidator(wrap_single)]


def check_path(value: Any) -> str:
    """Return a path as text. Raises ValueError for a value that is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"must be a path, not {value!r}")
    return os.fspath(value)


# Not as pydantic's text, which must be UTF-8; names of files need not.
File = Annotated[str, PlainValidator(check_path)]
Files = Annotated[tuple[File, ...], BeforeValidator(wrap_single)]


def read_named(kind: str, cls: type) -> BeforeValidator:
    """Convert a name, or a mapping with `name` and plain options, to `cls(name, sorted options)`.

    Raises PydanticCustomError, a fault of the field, for anything else. kind: of the thing named, for messages.
    """

    def read(value: Any) -> Any:
        if value is None or isinstance(value, cls):
            return value
        entries = {"name": value} if isinstance(value, str) else value
        if not isinstance(entries, Mapping) or not isinstance(entries.get("name"), str):
            text = "must be the name of {kind}, or a mapping with `name` and its options"
            raise PydanticCustomError("named", text, {"kind": kind})
        options = {key: setting for key, setting in entries.items() if key != "name"}
        for key, setting in options.items():
            _check_option(key, setting)
        return cls(entries["name"], tuple(sorted(options.items())))

    return BeforeValidator(read)


def _check_option(key: Any, value: Any) -> None:
    unfit = "" if isinstance(value, (bool, int, float, str)) else type(value).__name__
    if isinstance(value, (int, float)) and not abs(value) < _LARGEST:  # NaN is not below it either
        unfit = "one that is not finite" if isinstance(value, float) else "one so large"
    if unfit or not isinstance(key, str):
        text = "option '{key}' must be a number, a word or true/false, not {unfit}"
        raise PydanticCustomError(
            "named", text, {"key": str(key), "unfit": unfit or "named by a number"}
        )


def format_named(spec: Any) -> Any:
    """Convert an observer or quantizer to its form in YAML."""
    return {"name": spec.name, **dict(spec.options)} if spec.options else spec.name


Observer = Annotated[
    ObserverSpec, read_named("an observer", ObserverSpec), PlainSerializer(format_named)
]


# Every rule is matched against every node, and re's own cache holds 512 patterns.
@lru_cache(maxsize=4096)
def _compile_pattern(pattern: str) -> re.Pattern[str] | None:
    # "//" is no expression.
    written = len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/")
    return re.compile(pattern[1:-1]) if written else None


def match_names(names: Iterable[str]) -> Names:
    """Patterns that match these names and no others."""
    return tuple(f"/^{re.escape(name)}$/" for name in names)


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
        # Names of nodes such as "/conv1/Conv/" look like expressions and may hold brackets.
        if pattern == name or (
            regex.search(name) is not None if regex else fnmatchcase(name, pattern)
        ):
            return True
    return False


def check_patterns(value: Names) -> Names:
    """Return the patterns. Raises ValueError if one is empty or a regular expression does not compile."""
    for pattern in value:
        if not pattern:
            raise ValueError("a pattern must not be empty")
        try:
            _compile_pattern(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern[:60]!r} is not a regular expression: {error}") from error
    return value


Patterns = Annotated[Words, AfterValidator(check_patterns)]
