"""YAML text as plain values with the line of every key, and faults that name path, cause and nearest name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from onnxq.config.values import DEFAULT_TARGET
from onnxq.errors import ConfigError, ErrorClass, Location, OnnxqError, find_nearest, suggest_names
from onnxq.sites import Indices, JsonObject, NameSet

Path = tuple[str | int, ...]
# Values and characters of one document: far more than rules for every node of the largest networks need. Ten lines of
# aliases of aliases exceed them.
_VALUES = 100_000
_CHARACTERS = 2**24
# Levels; the configuration itself has six.
_DEPTH = 32
_DEEP = "is nested too deeply"
# Larger integers do not fit into 64 bits.
_LARGEST = 2**63
# Characters of a wrong value that a message repeats.
_SHOWN = 40


@dataclass(frozen=True)
class Document:
    """Values of one YAML file."""

    # Preset or path, for messages.
    source: str
    values: JsonObject
    # Line, from 1, of every key and list item by its path.
    lines: dict[Path, int]


def format_path(path: Path) -> str:
    """Format a path as people write it: rules[0].set.bits."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_yaml(text: str, source: str) -> Document:
    """Read one YAML mapping. Raises ConfigError with `source:line` for syntax, duplicate keys and unusable values."""
    loader = None
    try:
        # Some editors save UTF-8 with a byte order mark.
        loader = yaml.SafeLoader(text.removeprefix("\ufeff"))
        root = loader.get_single_node()
        reader = _ValueReader(loader, source)
        values = {} if root is None else reader.read(root, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            Location(source, mark.line + 1 if mark else None),
            f"not YAML: {error.problem}",
            "mend the file's syntax",
            code="Q302",
        ) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = (
            chr(error.character) if isinstance(error.character, int) else str(error.character)
        )
        cause = f"holds the character {character!r}, which no YAML may"
        raise ConfigError(
            f"{source}:{line}",
            cause,
            "remove it: the file may be damaged, or no YAML at all",
            code="Q302",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            Location(source), f"not YAML: {error}", "mend the file's syntax", code="Q302"
        ) from error
    except RecursionError as error:
        line = 1 if loader is None else int(loader.line) + 1
        raise ConfigError(
            f"{source}:{line}", _DEEP, "a configuration needs six levels at most", code="Q302"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            Location(source, 1),
            "must be a mapping of keys to values",
            f"start with e.g. `target: {DEFAULT_TARGET}`",
            code="Q302",
        )
    return Document(source, values, reader.lines)


class _ValueReader:
    """Converts nodes to values and expands aliases. Limited, because a few aliases of aliases expand without end."""

    def __init__(self, loader: yaml.SafeLoader, source: str) -> None:
        self.loader = loader
        self.source = source
        self.lines: dict[Path, int] = {}
        self.values = self.characters = 0

    def read(self, node: Any, path: Path, above: Indices) -> Any:
        """Return the value of a node. above: ids of the nodes around it."""
        where = Location(self.source, node.start_mark.line + 1)
        if id(node) in above:
            raise ConfigError(
                where,
                f"{format_path(path)}: an alias that contains itself",
                "write the value out",
                code="Q302",
            )
        if len(above) > _DEPTH:
            raise ConfigError(where, _DEEP, "a configuration needs six levels at most", code="Q302")
        # An alias is read again wherever it stands, so that a few lines can stand for
        # millions of values.
        self.values += 1
        if self.values > _VALUES or self.characters > _CHARACTERS:
            cause = f"its aliases stand for more than {_VALUES:,} values"
            raise ConfigError(where, cause, "write out what is meant, without aliases", code="Q302")
        inside = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                items.append(self.read(item, (*path, index), inside))
            return items
        return self._scalar(node, where / format_path(path) if path else where)

    def _mapping(self, node: Any, path: Path, inside: Indices) -> JsonObject:
        out = {}
        for key_node, value_node in node.value:
            where = Location(self.source, key_node.start_mark.line + 1)
            key = self._scalar(key_node, where) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise ConfigError(
                    where,
                    f"{format_path(path)}: a key must be a word, not {key!r}",
                    "quote it",
                    code="Q302",
                )
            here = (*path, key)
            if key in out:
                raise ConfigError(
                    where / format_path(here),
                    f"given twice, first in line {self.lines[here]}",
                    "keep one of them",
                    code="Q305",
                )
            self.lines[here] = key_node.start_mark.line + 1
            out[key] = self.read(value_node, here, inside)
        return out

    def _scalar(self, node: Any, where: Location) -> Any:
        try:
            value = self.loader.construct_object(node)
        except yaml.YAMLError:
            raise
        # PyYAML's constructors let ValueError, KeyError, AttributeError … through.
        except Exception as error:
            text = node.value if len(node.value) <= _SHOWN else f"{node.value[:_SHOWN]}..."
            raise ConfigError(
                where, f"{text!r} is no value of its kind", "quote it, or correct it", code="Q304"
            ) from error
        if value is not None and not isinstance(value, (str, int, float, bool)):
            raise ConfigError(
                where, f"{type(value).__name__} is no configuration value", "quote it", code="Q302"
            )
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ConfigError(
                where, "is too large a number", f"stay below {_LARGEST:,}", code="Q304"
            )
        if isinstance(value, str):
            self.characters += len(value)
            if any("\ud800" <= char <= "\udfff" for char in value):
                cause = "holds half a character (a lone surrogate)"
                raise ConfigError(where, cause, "write the character itself", code="Q304")
        return value


# The model of a document, or of a part of it.
Schema = type[BaseModel]
# Keys that are set by onnxq and not by people, by their model: never suggested.
Hidden = Mapping[Schema, NameSet]
# The fix of a fault that has none of its own.
CORRECT = "correct it here"
# Characters of a wrong value that a message repeats.
_LONGEST = 60


@dataclass(frozen=True)
class Fault:
    """One wrong entry of a document."""

    path: Path
    cause: str
    # "" if there is no better advice than to correct the entry.
    fix: str = ""
    # Entry of `onnxq.codes` for a configuration.
    code: str = "Q304"


def list_faults(error: ValidationError, root: Schema, hidden: Hidden | None = None) -> list[Fault]:
    """List every fault of a document that was validated as `root`."""
    return [
        _describe_fault(details, root, hidden or {}) for details in error.errors(include_url=False)
    ]


def join_faults(
    faults: Sequence[tuple[Location, Fault]],
    error: ErrorClass,
    fix: str = "",
    *,
    code: str = "",
    most: int | None = None,
) -> OnnxqError:
    """Make one error of all faults, each with its place.

    fix: an alternative to the fix of the first. most: further faults that it lists; None: all.
    """
    (subject, first), *rest = faults
    details = [
        f"also {other}: {fault.cause}; {fault.fix or CORRECT}" for other, fault in rest[:most]
    ]
    left = len(rest) - len(details)
    details += [f"and {left} more"] if left else []
    own = first.fix or CORRECT
    return error(
        subject, first.cause, f"{own}, or {fix}" if fix else own, code=code, details=details
    )


def _describe_fault(details: ErrorDetails, root: Schema, hidden: Hidden) -> Fault:
    path = details["loc"]
    kind = details["type"]
    value = details["input"]
    if kind == "extra_forbidden":
        key = str(path[-1])
        # The model whose keys stand beside it; None for none.
        owner: Schema | None = root
        for part in path[:-1]:
            if isinstance(part, str):
                field = None if owner is None else _list_keys(owner).get(part)
                owner = None if field is None else next(list_models(field.annotation), None)
        return Fault(
            path,
            f"unknown key {shorten_value(key)}",
            suggest_key(owner, key, hidden),
            "Q303",
        )
    if kind in ("literal_error", "enum"):
        choices = str(details.get("ctx", {}).get("expected", ""))
        known = [part.strip("' ") for part in choices.replace(" or ", ", ").split(", ")]
        close = find_nearest(value, known) if isinstance(value, str) and value not in known else ()
        fix = (
            f"did you mean {close[0]!r}?" if close else "write one of them, numbers without quotes"
        )
        return Fault(path, f"{shorten_value(value)} is not one of {', '.join(known)}", fix)
    if kind == "missing":
        return Fault(path, "is missing", "add it")
    if kind == "value_error":  # raised by our own validators, in our own words
        error = details["ctx"]["error"]
        if isinstance(error, OnnxqError):
            return Fault(path, error.fault, error.fix)
        return Fault(path, str(error))
    words = {"tuple_type": "must be a list", "model_type": "must be a mapping of keys to values"}
    message = words.get(
        kind, details["msg"].partition(", unable to")[0].replace("Input should be", "must be")
    )
    if value is None or isinstance(value, (str, int, float, bool)):
        message += f", not {shorten_value(value)}"
    return Fault(path, message)


def shorten_value(value: object) -> str:
    """Format a value as Python writes it, cut to one line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def suggest_key(owner: Schema | None, key: str, hidden: Hidden | None = None) -> str:
    """Suggest the nearest key. For a word that resembles a value (`symetric`) suggest that key and value."""
    if owner is None:
        return "remove it"
    secret = (hidden or {}).get(owner, frozenset())
    fields = {key: field for key, field in _list_keys(owner).items() if key not in secret}
    for name, field in fields.items():
        if any(key in inner.model_fields for inner in list_models(field.annotation)):
            return f"write it under `{name}`"
    if not find_nearest(key, fields):
        words = {
            str(word): name
            for name, f in fields.items()
            for word in list_choices(f.annotation)
            if word
        }
        for word in find_nearest(key, words, limit=1):
            return f"did you mean `{words[word]}: {word}`?"
    return suggest_names(key, fields)


def _list_keys(owner: Schema) -> dict[str, FieldInfo]:
    """The fields of a model by the keys that documents have for them."""
    return {field.alias or name: field for name, field in owner.model_fields.items()}


def list_models(annotation: Any) -> Iterator[Schema]:
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
