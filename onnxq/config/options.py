"""Options: the fields of the configuration that commands and Python functions take beside it, under short names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from onnxq.config.document import parse_yaml
from onnxq.config.faults import list_choices, list_faults, list_models
from onnxq.config.model import Config
from onnxq.config.values import Command, Section
from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names


@dataclass(frozen=True, eq=False)
class Option:
    """One option. path: of its field, dotted. name: for overrides. flags: of the command line."""

    path: str
    name: str
    flags: tuple[str, ...]
    metavar: str
    commands: Command
    field: FieldInfo

    @property
    def choices(self) -> tuple[str | int, ...]:
        """The words or numbers that its value is one of; () for other values."""
        return () if self.metavar else tuple(list_choices(self.field.annotation))

    @property
    def repeatable(self) -> bool:
        """True for any number of values, each with a flag of its own."""
        return self.field.default == () and not self.names and not list_choices(self.field.annotation)

    @property
    def bare(self) -> str:
        """Its value where its flag stands alone; "" where it must have one."""
        extra: Any = self.field.json_schema_extra
        return str(extra["bare"])

    @property
    def runs_code(self) -> bool:
        """True if its value names code that is run."""
        extra: Any = self.field.json_schema_extra
        return bool(extra["code"])

    @property
    def names(self) -> str:
        """The registry that lists its values; "" for none."""
        extra: Any = self.field.json_schema_extra
        return str(extra["names"])

    @property
    def is_whole(self) -> bool:
        """True for a whole number."""
        return int in (self.field.annotation, *get_args(self.field.annotation))

    @property
    def bounds(self) -> tuple[Any, Any]:
        """The least and the greatest value; None for no bound."""
        bounds = {"ge": None, "le": None}
        for limit in self.field.metadata:
            for end in bounds:
                bounds[end] = getattr(limit, end, bounds[end])
        return bounds["ge"], bounds["le"]

    @property
    def help(self) -> str:
        """Its meaning and its default."""
        text, default = str(self.field.description), self.field.default
        if isinstance(default, bool) or default in (None, "", ()):
            return text
        return f"{text} [default: {default:g}]" if isinstance(default, float) else f"{text} [default: {default}]"

    def parse(self, text: str) -> Any:
        """Convert the text of a command line. Raises ValueError, in words for people, for one that does not fit."""
        kind: Any = Annotated[(self.field.annotation, self.field)]
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            fault = list_faults(error, Config)[0]
            raise ValueError("; ".join(part for part in (fault.cause, fault.fix) if part)) from error


def _walk_fields(section: type[Section], prefix: str) -> Iterator[Option]:
    for key, field in section.model_fields.items():
        extra: Any = field.json_schema_extra
        if extra is None:
            for inner in list_models(field.annotation):
                yield from _walk_fields(inner, f"{prefix}{key}.") if issubclass(inner, Section) else ()
            continue
        name = extra["name"] or key
        flags = extra["flags"] or f"{'no-' if field.default is True else ''}{name.replace('_', '-')}"
        metavar = extra["metavar"] or ("" if list_choices(field.annotation) else "N")
        yield Option(
            f"{prefix}{key}",
            name,
            tuple(f"--{flag}" for flag in flags.split()),
            metavar,
            extra["commands"] or section.commands,
            field,
        )


@cache
def list_options(command: Command | None = None) -> tuple[Option, ...]:
    """List the options of a command, None for all, in the order of the configuration."""
    return tuple(option for option in _walk_fields(Config, "") if command is None or command in option.commands)


def list_code(values: Config | Mapping[str, Any]) -> Iterator[tuple[Option, str]]:
    """List the code that a configuration names, each with its option. Functions of Python have no name in it."""
    for option in list_options():
        if not option.runs_code:
            continue
        section, key = option.path.split(".")
        inner = values.get(section) if isinstance(values, Mapping) else getattr(values, section)
        value = inner.get(key) if isinstance(inner, Mapping) else getattr(inner, key, None)
        for code in value if isinstance(value, (list, tuple)) else (value,):
            if code and isinstance(code, str):
                yield option, code


def expand_names(overrides: Mapping[str, Any] | None, command: Command) -> dict[str, Any]:
    """Replace the names of a command's options by the paths of their fields; paths and sections stay.

    Raises ConfigError, with the nearest name, for a key that is neither.
    """
    paths = {option.name: option.path for option in list_options(command)}
    expanded = {}
    for key, value in (overrides or {}).items():
        head = str(key).partition(".")[0]
        if key not in paths and head not in Config.model_fields:
            known = (*paths, *Config.model_fields)
            raise ConfigError(f"option: {key}", "unknown key", suggest_names(head, known), code="Q303")
        expanded[paths.get(key, key)] = value
    return expanded


def parse_setting(text: str) -> tuple[str, Any]:
    """Convert KEY=VALUE, of which the value is YAML. Raises ValueError for other text."""
    key, _, value = text.partition("=")
    if not key or not value:
        raise ValueError(f"{text!r} is not KEY=VALUE, e.g. weights.bits=4")
    try:
        return key, parse_yaml(f"value: {value}", key).values["value"]
    except ConfigError as error:
        raise ValueError(f"{text!r}: {error.cause}") from error
