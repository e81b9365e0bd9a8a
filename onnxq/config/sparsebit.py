"""Sparsebit's YAML (BACKEND, SCHEDULE, W, A in capitals) converted to a configuration of onnxq.

Every key is converted or refused by name; none is dropped. Two differences are deliberate: a symmetric scale is
absmax / qmax here, absmax / (qmax + 0.5) there; `SPECIFIC` matches module paths, in which Sparsebit writes `_` for `.`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxq.config.document import Document, Path, format_path, shorten_value
from onnxq.errors import ConfigError, Location, suggest_names
from onnxq.sites import JsonObject

# Sparsebit's words -> ours, in the tables below.
# A document with one of these is in Sparsebit's form.
SECTIONS = ("BACKEND", "SKIP_TRACE_MODULES", "SCHEDULE", "W", "A")
_BACKENDS = {"virtual": "virtual", "onnxruntime": "ort", "tensorrt": "trt"}
_OBSERVERS = {
    "minmax": "minmax",
    "mse": "mse",
    "percentile": "percentile",
    "moving_average": "moving_average",
    "kl_histogram": "entropy",
    "aciq": "aciq",
}
_DISTRIBUTIONS = {"gaus": "gaussian", "laplace": "laplace"}
# Named alike in both.
_QUANTIZERS = {name: name for name in ("uniform", "lsq", "lsq+", "pact", "dorefa", "adaround")}
_SCHEMES = {
    "per-tensor-symmetric": ("tensor", "symmetric"),
    "per-tensor-affine": ("tensor", "asymmetric"),
    "per-channel-symmetric": ("channel", "symmetric"),
    "per-channel-affine": ("channel", "asymmetric"),
    # In groups along the input channels, of GROUPSIZE values.
    "per-group-symmetric": ("block", "symmetric"),
    "per-group-affine": ("block", "asymmetric"),
}
_ROLES = {"W": ("weights", "weight"), "A": ("activations", "activation")}


def convert_sparsebit(document: Document) -> Document:
    """Convert a document; every key keeps the line it came from.

    Raises ConfigError with file and line for keys and values that Sparsebit does not have or onnxq does not support.
    """
    reading = _Reading(document)
    reading.refuse_unknown((), document.values, SECTIONS)
    place = ("BACKEND",)
    backend = str(reading.get_value(place, "virtual"))
    reading.put_value(("target",), reading.translate(backend, _BACKENDS, place), place)
    if reading.values["target"] == "trt":
        # TensorRT refuses a DequantizeLinear of int32.
        reading.put_value(("bias",), "float", place)
    place = ("SKIP_TRACE_MODULES",)
    if skipped := reading.read_list(place, "names", '["layer4", "fc"]'):
        patterns = [_convert_pattern(str(name)) for name in skipped]
        reading.put_value(("torch", "skip_trace"), patterns, place)
    _read_schedule(reading)
    rules = []
    for section in ("A", "W"):
        rules += _read_section(reading, section)
    if rules:
        reading.values["rules"] = rules
        for index, rule in enumerate(rules):
            reading.lines["rules", index] = rule.pop("at")
    return Document(document.source, reading.values, reading.lines)


@dataclass
class _Reading:
    """Sparsebit's document, and the converted values so far."""

    document: Document
    values: JsonObject = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)

    def find_place(self, path: Path) -> Location:
        # A key that is missing has no line; the nearest section around it has.
        while path and path not in self.document.lines:
            path = path[:-1]
        line = self.document.lines.get(path)
        return Location(self.document.source, line, format_path(path) if line else "")

    def find_line(self, path: Path) -> int:
        return self.document.lines.get(path, 1)

    def get_value(self, path: Path, default: Any = None) -> Any:
        at: Any = self.document.values
        for part in path:
            if not isinstance(at, Mapping) or part not in at:
                return default
            at = at[part]
        return at

    def put_value(self, path: Path, value: Any, origin: Path) -> None:
        at = self.values
        for n, part in enumerate(path[:-1], start=1):
            at = at.setdefault(str(part), {})
            self.lines.setdefault(path[:n], self.find_line(origin))
        at[str(path[-1])] = value
        self.lines[path] = self.find_line(origin)

    def move_value(self, path: Path, origin: Path, default: Any) -> None:
        """Put the value of an entry, or a default, into a place of ours."""
        self.put_value(path, self.get_value(origin, default), origin)

    def refuse(self, path: Path, cause: str, fix: str, code: str = "Q304") -> ConfigError:
        """Make the error of an entry."""
        return ConfigError(self.find_place(path), cause, fix, code=code)

    def refuse_unknown(self, path: Path, values: Any, known: Sequence[str]) -> None:
        """Refuse a section that is no mapping, and keys that Sparsebit does not have."""
        if not isinstance(values, Mapping):
            raise self.refuse(path, "must be a mapping", f"with {', '.join(known)}")
        for key in values:
            if key not in known:
                raise self.refuse(
                    (*path, key), f"unknown key {key!r}", suggest_names(str(key), known), "Q303"
                )

    def read_list(self, path: Path, items: str, example: str) -> list[Any]:
        """Return a list, [] for null or a missing key. items, example: for the message where it is none."""
        entries = self.get_value(path) or []
        if not isinstance(entries, list):
            raise self.refuse(path, f"must be a list of {items}", f"e.g. {example}")
        return entries

    def read_number(self, path: Path, value: Any) -> float:
        """Read a finite number. Sparsebit accepts text, too: "1e-3" is text in YAML."""
        try:
            number = float(value) if isinstance(value, (int, float, str)) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.refuse(path, f"{shorten_value(value)} is no number", "write e.g. 0.001")
        return number

    def translate(self, word: str, known: JsonObject, path: Path) -> Any:
        if word.lower() not in known:
            raise self.refuse(
                path, f"{word!r} is none of {', '.join(known)}", suggest_names(word, known)
            )
        return known[word.lower()]


def _read_schedule(reading: _Reading) -> None:
    path = ("SCHEDULE",)
    reading.refuse_unknown(
        path, reading.get_value(path, {}), ("FUSE_BN", "BN_TUNING", "DISABLE_UNNECESSARY_QUANT")
    )
    tuned, fused = (reading.get_value((*path, key), False) for key in ("BN_TUNING", "FUSE_BN"))
    if tuned and fused:
        raise reading.refuse(
            (*path, "BN_TUNING"),
            "no batch norms are left to tune once FUSE_BN folded them",
            "keep one of the two: `with model.batchnorm_tuning():` folds them at its end",
        )
    # Sparsebit's default is False, ours True.
    reading.move_value(("torch", "fuse_bn"), (*path, "FUSE_BN"), False)
    redundant = (*path, "DISABLE_UNNECESSARY_QUANT")
    reading.move_value(("torch", "disable_redundant"), redundant, True)


def _read_section(reading: _Reading, name: str) -> list[JsonObject]:
    """Convert W or A: its fields are put in place, its exceptions are returned as rules."""
    section, role = _ROLES[name]
    path = (name,)
    known = ("QSCHEME", "QUANTIZER", "OBSERVER", "SPECIFIC", *(("QADD",) if name == "A" else ()))
    reading.refuse_unknown(path, reading.get_value(path, {}), known)
    keys = {"QSCHEME": reading.get_value((name, "QSCHEME"))}
    for part in ("QUANTIZER", "OBSERVER"):
        keys |= _flatten_keys(part, reading.get_value((name, part), {}))
    keys = {key: value for key, value in keys.items() if value is not None}
    for key, value in _convert_keys(reading, path, keys).items():
        target = ("torch", section, key) if key == "quantizer" else (section, key)
        reading.put_value(target, value, path)
    rules = _read_specific(reading, name, role)
    # Behind the exceptions: the first rule that matches wins.
    if _is_off(keys):
        rules.append({"role": role, "set": {"float": True}, "at": reading.find_line(path)})
    if name == "A":
        place = (name, "QADD")
        reading.refuse_unknown(place, reading.get_value(place, {}), ("ENABLE_QUANT",))
        adds = reading.get_value((*place, "ENABLE_QUANT"), False)
        reading.put_value(("torch", "multi_input"), {"add": "insert" if adds else "none"}, place)
    return rules


def _flatten_keys(prefix: str, values: Any) -> JsonObject:
    """Flatten nested keys to Sparsebit's dotted ones."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    keys: JsonObject = {}
    for name, inner in values.items():
        keys |= _flatten_keys(f"{prefix}.{name}", inner)
    return keys


def _is_off(keys: JsonObject) -> bool:
    """True if switched off, by DISABLE or in the older form of 0 bits."""
    return bool(keys.get("QUANTIZER.DISABLE")) or keys.get("QUANTIZER.BIT") == 0


_FIELDS: Mapping[str, Callable[[_Reading, Path, Any], JsonObject]] = {
    "QSCHEME": lambda r, p, v: dict(
        zip(("granularity", "scheme"), r.translate(str(v), _SCHEMES, p), strict=True)
    ),
    # 0 bits switch off, see `_is_off`.
    "QUANTIZER.BIT": lambda _, __, v: {"bits": v} if v else {},
    # One group of the whole channel is -1.
    "QUANTIZER.GROUPSIZE": lambda _, __, v: (
        {"block_size": v} if v != -1 else {"granularity": "channel"}
    ),
    "QUANTIZER.DISABLE": lambda _, __, ___: {},
    "QUANTIZER.TYPE": lambda r, p, v: {"quantizer": {"name": r.translate(str(v), _QUANTIZERS, p)}},
    "QUANTIZER.PACT.ALPHA_VALUE": lambda _, __, v: {"alpha": v},
    "OBSERVER.TYPE": lambda r, p, v: {"observer": {"name": r.translate(str(v), _OBSERVERS, p)}},
    # Sparsebit gives the share of values that is clipped, onnxq the percentage that is not.
    "OBSERVER.PERCENTILE.ALPHA": lambda r, p, v: {
        "percentile": 100.0 * (1.0 - r.read_number(p, v))
    },
    "OBSERVER.ACIQ.DISTRIBUTION": lambda r, p, v: {
        "distribution": r.translate(str(v), _DISTRIBUTIONS, p)
    },
    "OBSERVER.MOVING_AVERAGE.EMA_RATIO": lambda _, __, ___: {},
    "OBSERVER.LAYOUT": lambda _, __, ___: {},
}
# Option -> its owner. Sparsebit also writes options of observers that are not chosen; these are left out.
_OPTIONS = {
    "alpha": ("quantizer", "pact"),
    "percentile": ("observer", "percentile"),
    "distribution": ("observer", "aciq"),
}


def _convert_keys(reading: _Reading, path: Path, keys: JsonObject) -> JsonObject:
    """Convert Sparsebit's dotted keys to fields of a section or of a rule.

    EMA_RATIO and LAYOUT have no effect: the moving average is the mean of the samples whatever their order, and the
    channel axis of an activation follows from the operator.
    """
    out: JsonObject = {}
    options: JsonObject = {}
    for key, value in keys.items():
        at = (*path, *key.split("."))
        if key not in _FIELDS:
            raise reading.refuse(at, f"unknown key {key!r}", suggest_names(key, _FIELDS), "Q303")
        for name, setting in _FIELDS[key](reading, at, value).items():
            (options if name in _OPTIONS else out)[name] = setting
    for name, setting in options.items():
        owner, kind = _OPTIONS[name]
        if owner in out and out[owner]["name"] == kind:
            out[owner][name] = setting
    return out


def _read_specific(reading: _Reading, name: str, role: str) -> list[JsonObject]:
    """Convert exceptions, [{pattern: [key, value, …]}], to rules in the same order; the first match wins in both."""
    path = (name, "SPECIFIC")
    listed = reading.read_list(path, "mappings of patterns", '[{"conv1": […]}]')
    rules = []
    for number, patterns in enumerate(listed):
        if not isinstance(patterns, Mapping):
            raise reading.refuse(
                (*path, number), "must be a mapping of patterns", 'e.g. {"conv1": […]}'
            )
        for pattern, pairs in patterns.items():
            at = (*path, number, str(pattern))
            if not isinstance(pairs, list) or len(pairs) % 2:
                raise reading.refuse(
                    at, "must list keys and values in turn", '["QUANTIZER.BIT", 8]'
                )
            keys = {str(key): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)}
            changes = {"float": True} if _is_off(keys) else _convert_keys(reading, at, keys)
            rules.append(
                {
                    "node": _convert_pattern(str(pattern)),
                    "role": role,
                    "set": changes,
                    "at": reading.find_line(at),
                }
            )
    return rules


def _convert_pattern(glob: str) -> str:
    """Convert Sparsebit's glob over names with `_` for `.` to a regular expression over module paths."""
    special = {"*": ".*", "?": ".", "_": "[._]", ".": "[._]"}
    return "/^" + "".join(special.get(char, re.escape(char)) for char in glob) + "$/"
