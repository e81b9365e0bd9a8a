"""YAML files, presets and overrides as a Config.

Presets are YAML files in `configs/` of a checkout or in the package that a wheel installs. Code that files name, such
as libraries, functions and schedulers, is not run for a file from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from onnxq.config.data import BYTES
from onnxq.config.document import (
    Document,
    Hidden,
    Path,
    format_path,
    join_faults,
    list_faults,
    parse_yaml,
    suggest_key,
)
from onnxq.config.model import Config, list_code
from onnxq.config.rules import Rule
from onnxq.config.sparsebit import SECTIONS, convert_sparsebit
from onnxq.config.values import DEFAULT_PRESET
from onnxq.errors import ConfigError, Location, replace_surrogates, suggest_names
from onnxq.files import describe_os_error, read_input
from onnxq.sites import JsonObject, Names, Settings

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_PACKAGE = "onnxq_configs"


class UnreadableConfigError(ConfigError):
    """No preset and no file can be read under a name; the fault lies with the text that names it."""


def _find_folder() -> Traversable:
    # The checkout comes first: an editable install may not map the data-only package.
    beside = FilePath(__file__).resolve().parents[2] / "configs"
    if (beside / f"{DEFAULT_PRESET}.yaml").is_file():
        return beside
    try:
        return resources.files(_PACKAGE)
    # The others: onnxq lies in a zip, where Python finds no folders without code; 3.13 says so by a ValueError.
    except (ModuleNotFoundError, NotADirectoryError, ValueError) as error:
        cause = f"neither {beside} nor a folder {_PACKAGE} is there"
        raise ConfigError(
            "presets",
            cause,
            "reinstall onnxq, as files and not in a zip; for PyInstaller see the README",
            code="Q301",
        ) from error


def list_presets() -> Names:
    """List the names of all presets, sorted."""
    names = (file.name for file in _find_folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_preset(name: str) -> str:
    """Read the YAML of a preset. Raises ConfigError with the nearest names if there is none."""
    if name not in list_presets():
        raise UnreadableConfigError(
            f"preset {name!r}",
            "no preset or file of this name",
            suggest_names(name, list_presets()),
            code="Q301",
        )
    return (_find_folder() / f"{name}.yaml").read_text(encoding="utf-8")


# Kept: configurations extend the same few presets, and reading one takes longer than all the rest of a configuration.
@cache
def _parse_preset(name: str) -> Document:
    return parse_yaml(read_preset(name), name)


# Bytes. No configuration is as large; /dev/zero is larger.
_MOST_BYTES = 16 * 2**20
# The place of values that came as arguments.
_OVERRIDE = Location("", None, "option")
# Mappings whose keys belong together: one in a file replaces the inherited one instead of being merged with it.
_WHOLE = ("observer", "quantizer")
# Lists that are put in front of inherited ones.
_JOINED = ("rules", "libraries", "plugins")
# Fields that loading sets itself.
_SET_HERE: Hidden = {
    Config: frozenset(("source", "trust")),
    Rule: frozenset(("line", "source")),
}


def read_config(
    source: str | FilePath | Config | None = None,
    overrides: Settings | None = None,
    *,
    target: str | None = None,
) -> Config:
    """Read a configuration as `onnxq.load_config` does, which then checks the limits of its target.

    Raises ConfigError for unknown keys and values, with file, line, dotted path and the nearest name.
    """
    try:
        nested = nest_keys(_to_plain(overrides or {}))
    except RecursionError as error:
        raise ConfigError(
            _OVERRIDE, "holds a value inside itself", "give plain values", code="Q304"
        ) from error
    if isinstance(source, Config):
        if not nested:
            return source
        # Defaults, too: a section that an override gives a part of keeps the rest of them.
        values = _to_plain(source.model_dump(exclude={"source"}))
        places = dict(source._places)
        name = source.source
    else:
        name = str(_choose_preset(target) if source is None else source)
        values, places = _read_chain(name if source is None else source, (), target)
    places |= dict.fromkeys(_list_paths(nested), _OVERRIDE)
    values = {**_merge_values(values, nested), "source": replace_surrogates(name)}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        faults = [
            (_locate_fault(fault.path, places, name), fault)
            for fault in list_faults(error, Config, _SET_HERE)
        ]
        raise join_faults(faults, ConfigError, code=faults[0][1].code) from error
    config._places.update(places)
    return config


def _choose_preset(target: object) -> str:
    """The preset of files that extend nothing. A target without one of its own has `ort-int8`."""
    known = list_presets()
    return next((name for name in (str(target), f"{target}-int8") if name in known), DEFAULT_PRESET)


def _read_chain(
    source: str | FilePath, above: Names, target: object
) -> tuple[JsonObject, dict[Path, Location]]:
    """Values and places of a document on top of those that it extends. target: that of documents which extend it."""
    document = _load_document(source, above)
    # A preset that extends nothing, and a document of Sparsebit's, say all there is.
    whole = _is_preset(document)
    if not document.values.keys().isdisjoint(SECTIONS):
        document = convert_sparsebit(document)
        whole = True
    values = dict(document.values)
    _refuse_reserved(document)
    places = {path: Location(document.source, line) for path, line in document.lines.items()}
    _anchor_paths(values, FilePath(document.source).parent)
    if not _is_preset(document):
        # A preset comes with the package, so that code which it names needs no trust.
        named = ((tuple(option.path.split(".")), code) for option, code in list_code(values))
        places |= {(*path, code): places[path] for path, code in named}
    base_name = values.pop("extends", None)
    for index, rule in enumerate(_list_rules(values)):
        if isinstance(rule, dict):
            rule |= {"line": document.lines[("rules", index)], "source": document.source}
    target = target or values.get("target")
    if base_name is None:
        if whole:
            return values, places
        base, base_places = _read_chain(_choose_preset(target), (), None)
        # A target without a preset of its own begins with that of ONNX Runtime, which names
        # another.
        base |= {"target": target} if target else {}
    else:
        where = places[("extends",)]
        if not isinstance(base_name, str):
            raise ConfigError(
                where / "extends",
                "must be the name of a preset or a file",
                "e.g. `extends: ort-int8`",
                code="Q306",
            )
        beside = FilePath(document.source).parent / base_name
        inherited = beside if _is_path(base_name) and not _is_preset(document) else base_name
        try:
            base, base_places = _read_chain(inherited, (*above, document.source), target)
        except UnreadableConfigError as error:
            # Raised where nothing of this name can be read: the place to correct is the line that names it.
            raise ConfigError(
                where / f"extends: {error.subject}", error.cause, error.fix, code=error.code
            ) from error
    own = len(_list_rules(values))
    # Inherited rules stand behind the own ones, and so do the places that errors name for them.
    moved = {_shift_rule(path, own): place for path, place in base_places.items()}
    return _merge_values(base, values), {**moved, **places}


def _is_preset(document: Document) -> bool:
    """True for a preset, whose `source` is a bare name."""
    return document.source in list_presets()


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name


def _load_document(source: str | FilePath, above: Names) -> Document:
    name = str(source)
    path = FilePath(source)
    try:
        # By the real path, since a circle may go through links or other spellings of one file.
        files = {os.path.realpath(file) for file in above if _is_path(file)}
        if name in above or (_is_path(name) and os.path.realpath(path) in files):
            raise ConfigError(
                name,
                f"extends itself: {' -> '.join((*above, name))}",
                "break the circle",
                code="Q306",
            )
        if (
            # A file in the working folder takes no preset's place; `./NAME` names it.
            isinstance(source, str)
            and not _is_path(name)
            and (name in list_presets() or not os.path.isfile(path))
        ):
            return _parse_preset(name)
        text = read_input(path, ConfigError, limit=_MOST_BYTES, pipes=True).decode()
    except FileNotFoundError as error:
        fix = suggest_names(path.stem, list_presets())
        subject = f"config {name}"
        hint = f"presets go by name; {fix}"
        raise UnreadableConfigError(subject, "no such file", hint, code="Q301") from error
    except (OSError, ValueError) as error:  # ValueError: no text, or a NUL in the name
        raise UnreadableConfigError(
            f"config {name if name.isprintable() else repr(name)}",
            f"cannot be read: {describe_os_error(error)}",
            "give a YAML file or a preset's name",
            code="Q301",
        ) from error
    return parse_yaml(text, name)


def _refuse_reserved(document: Document) -> None:
    for path in document.lines:
        key = path[-1]
        owner = (
            Config if len(path) == 1 else Rule if len(path) == 3 and path[0] == "rules" else None
        )
        if owner is not None and key in _SET_HERE[owner]:
            where = Location(document.source, document.lines[path], format_path(path))
            raise ConfigError(
                where, f"unknown key {key!r}", suggest_key(owner, key, _SET_HERE), code="Q303"
            )


def _list_rules(values: Settings) -> list[Any]:
    rules = values.get("rules")
    return rules if isinstance(rules, list) else []


def _anchor_paths(values: JsonObject, folder: FilePath) -> None:
    """Make paths of shared libraries and of a tokenizer relative to the working directory, as in the command line."""
    for name, key in (("runtime", "libraries"), ("runtime", "plugins"), ("data", "tokenizer")):
        section = values.get(name)
        paths = section.get(key) if isinstance(section, dict) else None
        listed = [paths] if isinstance(paths, str) else paths
        if isinstance(listed, list) and all(isinstance(path, str) for path in listed):
            anchored: Any = [str(folder / path) for path in listed]
            if key == "tokenizer":
                anchored = paths if paths in ("", BYTES) else anchored[0]
            values[name] = {**values[name], key: anchored}


def _shift_rule(path: Path, by: int) -> Path:
    match path:
        case ("rules", int(index), *rest):
            return ("rules", index + by, *rest)
    return path


def _merge_values(base: Settings, top: Settings) -> JsonObject:
    out = dict(base)
    for key, value in top.items():
        below = out.get(key)
        if key in _JOINED and isinstance(below, list):
            out[key] = [*(value if isinstance(value, list) else [value]), *below]
        elif isinstance(value, Mapping) and isinstance(below, Mapping) and key not in _WHOLE:
            out[key] = _merge_values(below, value)
        else:
            out[key] = value
    return out


def write_config(config: Config, base: Config) -> str:
    """The configuration as YAML: what is other than in `base`, the preset that a file of its target starts from.

    Its rules are all there; what commands write, and ask of accuracy, is left out.
    """
    import yaml

    outside = {"source", "trust", "output", "accuracy", "search"}
    values, usual = (one.model_dump(mode="json", exclude=outside) for one in (config, base))
    changed = _find_changes(values, usual)
    rules = [
        rule.model_dump(mode="json", exclude_defaults=True, exclude={"line", "source"})
        for rule in config.rules
    ]
    # Those of the base are the last ones: a file that extends it gets them anyway.
    own = rules[: len(rules) - len(base.rules)] if base.rules else rules
    named = {"target": config.target, **changed} | ({"rules": own} if own else {})
    return yaml.safe_dump(named, sort_keys=False, default_flow_style=None, width=120)


def _find_changes(values: Settings, usual: Settings) -> JsonObject:
    """The values that are others, nested as they are."""
    changed = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping):
            value = _find_changes(value, usual[key])
        if value != usual.get(key) and value != {}:
            changed[key] = value
    return changed


def nest_keys(overrides: Settings) -> JsonObject:
    """Convert values by dotted path to nested ones. Raises ConfigError for keys that are no words."""
    out: JsonObject = {}
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"option {key!r}",
                "is no key: a key is a word",
                'e.g. {"data.samples": 64}',
                code="Q303",
            )
        # None means that an option was not given, which leaves what the file says.
        if value is None:
            continue
        head, _, rest = key.partition(".")
        inner = {rest: value} if rest else value
        if isinstance(inner, Mapping):
            inner = nest_keys(inner)
        out = _merge_values(out, {head: inner})
    return out


def _list_paths(values: Settings, above: Path = ()) -> list[Path]:
    out = []
    for key, value in values.items():
        out.append((*above, key))
        if isinstance(value, Mapping):
            out += _list_paths(value, (*above, key))
    return out


def _to_plain(value: Any) -> Any:
    """Convert a value of Python to those of YAML; what has no such form, as a function, stays."""
    if isinstance(value, BaseModel):
        # Defaults that nobody wrote would take the place of what the preset says.
        value = value.model_dump(
            exclude={"source"} if isinstance(value, Config) else None, exclude_unset=True
        )
    if isinstance(value, Mapping):
        return {key: _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(inner) for inner in value]
    # numpy's numbers and arrays
    return value.tolist() if hasattr(value, "tolist") else value


def _locate_fault(path: Path, places: Mapping[Path, Location], source: str) -> Location:
    """`file:line: path`, with the line of the innermost part of the path that was written."""
    # A value that is missing has no line of its own, and its section has one.
    known = next((n for n in range(len(path), 0, -1) if path[:n] in places), 0)
    place = places[path[:known]] if known else Location(source)
    return place / format_path(path) if path else place


def check_trust(config: Config, overrides: Settings) -> None:
    """Raise ConfigError if a file that is not trusted names code which `overrides`, of the caller, do not name."""
    trusted = {os.path.realpath(file) for file in config.trust}
    own = [(option.path, code) for option, code in list_code(nest_keys(overrides))]
    for option, code in list_code(config):
        place = config.find_code(option.path, code)
        if place is None or (option.path, code) in own or os.path.realpath(place.file) in trusted:
            continue
        cause = f"names code that would be run, {code!r}, and the file is not trusted"
        fix = f"look at it; then name it yourself, `{option.name}={code!r}`, or trust the file, `trust={place.file!r}`"
        raise ConfigError(place / option.path, cause, fix, code="Q324")


def parse_setting(text: str) -> tuple[str, Any]:
    """Convert KEY=VALUE, of which the value is YAML. Raises ValueError for other text."""
    key, _, value = text.partition("=")
    if not key or not value:
        raise ValueError(f"{text!r} is not KEY=VALUE, e.g. weights.bits=4")
    try:
        return key, parse_yaml(f"value: {value}", key).values["value"]
    except ConfigError as error:
        raise ValueError(f"{text!r}: {error.cause}") from error
