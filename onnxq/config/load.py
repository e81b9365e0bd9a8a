"""YAML files, presets and overrides -> Config. Every fault names file, line, dotted path and the nearest name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from onnxq.config.data import DataConfig, ImageConfig, VerifyConfig
from onnxq.config.document import Document, Path, dotted, parse
from onnxq.config.front_end import FrontEnd, Trained
from onnxq.config.limits import check_limits
from onnxq.config.model import Config
from onnxq.config.presets import preset_names, preset_text
from onnxq.config.sparsebit import converted, recognised
from onnxq.config.wish import QuantWish, Rule, RuleSet
from onnxq.errors import ConfigError, Location
from onnxq.nearest import did_you_mean, nearest

DEFAULT = "ort-int8"
_OVERRIDE = Location("", None, "option")
# Mappings whose keys belong together: a file's own takes the place of the inherited one.
_WHOLE = ("observer", "quantizer")
_SET_HERE = {"": {"source"}, "rules[]": {"line", "source"}}
_MODELS: dict[str, type[Any]] = {
    "": Config,
    "activations": QuantWish,
    "weights": QuantWish,
    "rules[]": Rule,
    "rules[].set": RuleSet,
    "data": DataConfig,
    "data.images": ImageConfig,
    "verify": VerifyConfig,
    "torch": FrontEnd,
    "torch.weights": Trained,
    "torch.activations": Trained,
}


def load_config(source: str | FilePath | Config | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a preset by name or a YAML file by path; None is the preset `ort-int8`; a Config is taken as it is.

    overrides: values by dotted path ("data.samples") or nested; None means not given. A file may start from
    a preset or another file with `extends:`; its own rules then come before the inherited ones.
    Raises ConfigError for unknown keys and values, with file, line, dotted path and the nearest name.
    """
    given = _nested(overrides or {})
    if isinstance(source, Config):
        plain = source.model_dump(mode="json", exclude={"source"}, exclude_unset=True)
        return _build(_merge(plain, given), dict.fromkeys(_paths(given), _OVERRIDE), source.source) if given else source
    values, places = _read(source if source is not None else DEFAULT, ())
    for path in _paths(given):
        places[path] = _OVERRIDE
    return _build(_merge(values, given), places, str(source if source is not None else DEFAULT))


def _read(source: str | FilePath, above: tuple[str, ...]) -> tuple[dict[str, Any], dict[Path, Location]]:
    document = _document(source, above)
    if recognised(document.values):
        document = converted(document)
    values = dict(document.values)
    _refuse_reserved(document)
    places = {path: Location(document.source, line) for path, line in document.lines.items()}
    base_name = values.pop("extends", None)
    for index, rule in enumerate(_rules(values)):
        if isinstance(rule, dict):
            rule |= {"line": document.lines[("rules", index)], "source": document.source}
    if base_name is None:
        return values, places
    where = places[("extends",)]
    if not isinstance(base_name, str):
        raise ConfigError(
            where / "extends", "must be the name of a preset or a file", "e.g. `extends: ort-int8`", code="Q306"
        )
    seen = (*above, document.source)
    beside = FilePath(document.source).parent / base_name
    try:
        base, base_places = _read(beside if _is_path(base_name) and not _is_preset(document) else base_name, seen)
    except ConfigError as error:
        if error.subject.startswith(("preset ", "config ")):
            raise ConfigError(where / f"extends: {error.subject}", error.cause, error.fix, code=error.code) from error
        raise
    own = len(_rules(values))
    moved = {_shift(path, own): place for path, place in base_places.items()}
    return _merge(base, values), {**moved, **places}


def _is_preset(document: Document) -> bool:
    """True when the document is a preset, whose name has no folder."""
    return document.source in preset_names()


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name


def _document(source: str | FilePath, above: tuple[str, ...]) -> Document:
    name = str(source)
    path = FilePath(source)
    if name in above:
        raise ConfigError(name, f"extends itself: {' -> '.join((*above, name))}", "break the circle", code="Q306")
    if isinstance(source, str) and not _is_path(name) and (name in preset_names() or not path.is_file()):
        return parse(preset_text(name), name)
    try:
        return parse(path.read_text(encoding="utf-8"), name)
    except FileNotFoundError as error:
        fix = did_you_mean(path.stem, preset_names())
        raise ConfigError(f"config {name}", "no such file", f"presets go by name; {fix}", code="Q301") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config {name}", f"cannot be read: {error}", "give a YAML file or a preset's name", code="Q301"
        ) from error


def _refuse_reserved(document: Document) -> None:
    for path in document.lines:
        owner, key = _pattern(path[:-1]), path[-1]
        if key in _SET_HERE.get(owner, ()):
            where = Location(document.source, document.lines[path], dotted(path))
            raise ConfigError(where, f"unknown key {key!r}", _key_hint(owner, str(key)), code="Q303")


def _rules(values: Mapping[str, Any]) -> list[Any]:
    rules = values.get("rules")
    return rules if isinstance(rules, list) else []


def _shift(path: Path, by: int) -> Path:
    if len(path) > 1 and path[0] == "rules" and isinstance(path[1], int):
        return ("rules", path[1] + by, *path[2:])
    return path


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        below = out.get(key)
        if key == "rules" and isinstance(value, list) and isinstance(below, list):
            out[key] = value + below
        elif isinstance(value, Mapping) and isinstance(below, Mapping) and key not in _WHOLE:
            out[key] = _merge(below, value)
        else:
            out[key] = value
    return out


def _nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in overrides.items():
        if value is None:
            continue
        head, _, rest = key.partition(".")
        inner = _nested({rest: value}) if rest else _nested(value) if isinstance(value, Mapping) else value
        merged = _merge({head: out[head]} if head in out else {}, {head: inner})
        out[head] = merged[head]
    return out


def _paths(values: Mapping[str, Any], above: Path = ()) -> list[Path]:
    out: list[Path] = []
    for key, value in values.items():
        out.append((*above, key))
        if isinstance(value, Mapping):
            out += _paths(value, (*above, key))
    return out


def _build(values: Mapping[str, Any], places: Mapping[Path, Location], source: str) -> Config:
    # JSON mode of pydantic's strict validation takes lists for tuples and words for enums, and nothing else.
    text = json.dumps({**values, "source": source}, default=_plain)
    try:
        config = Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise _explain(error, places, source) from error
    config._lines.update({dotted(path): place for path, place in places.items()})
    return check_limits(config)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if hasattr(value, "model_dump") else str(value)


def _explain(error: ValidationError, places: Mapping[Path, Location], source: str) -> ConfigError:
    found = [_one(details, places, source) for details in error.errors(include_url=False)]
    first = found[0]
    if len(found) == 1:
        return first
    rest = "".join(f"\n  also {other.subject}: {other.cause}; {other.fix}" for other in found[1:])
    return first.replace_text(fix=first.fix + rest)


def _one(details: ErrorDetails, places: Mapping[Path, Location], source: str) -> ConfigError:
    path = tuple(details["loc"])
    while path and path not in places and details["type"] != "missing":
        shorter = path[:-1]
        if shorter in places or not shorter:
            break
        path = shorter
    place = next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), Location(source))
    subject = place / dotted(path) if path else place
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return ConfigError(
            subject, f"unknown key {path[-1]!r}", _key_hint(_pattern(path[:-1]), str(path[-1])), code="Q303"
        )
    if kind in ("literal_error", "enum"):
        choices = str(details.get("ctx", {}).get("expected", ""))
        known = [part.strip("' ") for part in choices.replace(" or ", ", ").split(", ")]
        close = nearest(value, known) if isinstance(value, str) and value not in known else ()
        fix = f"did you mean {close[0]!r}?" if close else "write one of them, numbers without quotes"
        return ConfigError(subject, f"{value!r} is not one of {', '.join(known)}", fix, code="Q304")
    if kind == "missing":
        return ConfigError(subject, "is missing", "add it", code="Q304")
    message = str(details["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    if kind != "value_error" and (value is None or isinstance(value, (str, int, float, bool))):
        message += f", not {value!r}"
    return ConfigError(subject, message, "correct it here", code="Q304")


def _key_hint(owner: str, key: str) -> str:
    """The nearest key; a word that is some key's value (`symetric`) leads to that key."""
    fields = {k: f for k, f in _MODELS[owner].model_fields.items() if k not in _SET_HERE.get(owner, ())}
    if not nearest(key, fields):
        words = {str(word): name for name, f in fields.items() for word in _words(f.annotation) if word}
        for word in nearest(key, words, limit=1):
            return f"did you mean `{words[word]}: {word}`?"
    return did_you_mean(key, fields, show=20)


def _words(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for part in get_args(annotation) for word in _words(part)]


def _pattern(path: Path) -> str:
    return "".join("[]" if isinstance(p, int) else f".{p}" if i else str(p) for i, p in enumerate(path))
