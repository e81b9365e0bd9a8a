"""YAML text -> plain values, with the line of every key. Only scalars, lists and mappings with word keys pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from onnxq.errors import ConfigError, Location

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """Values of one YAML file; `lines` holds the line (from 1) of every key and list item by its path."""

    source: str
    values: dict[str, Any]
    lines: dict[Path, int]


def dotted(path: Path) -> str:
    """A path as people write it: rules[0].set.bits."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse(text: str, source: str) -> Document:
    """Read one YAML mapping. ConfigError carries `source:line` for syntax, duplicate keys and unusable values."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        lines: dict[Path, int] = {}
        values = {} if root is None else _value(loader, root, (), lines, source, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            Location(source, mark.line + 1 if mark else None),
            f"not YAML: {error.problem}",
            "mend the file's syntax",
            code="Q302",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(Location(source), f"not YAML: {error}", "mend the file's syntax", code="Q302") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            Location(source, 1), "must be a mapping of keys to values", "start with e.g. `target: ort`", code="Q302"
        )
    return Document(source, values, lines)


def _value(
    loader: yaml.SafeLoader, node: Any, path: Path, lines: dict[Path, int], source: str, above: tuple[int, ...]
) -> Any:
    where = Location(source, node.start_mark.line + 1)
    if id(node) in above:
        raise ConfigError(where, f"{dotted(path)}: an alias that contains itself", "write the value out", code="Q302")
    inside = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_where = Location(source, key_node.start_mark.line + 1)
            key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise ConfigError(
                    key_where, f"{dotted(path)}: a key must be a word, not {key!r}", "quote it", code="Q302"
                )
            here = (*path, key)
            if key in out:
                raise ConfigError(
                    key_where / dotted(here),
                    f"given twice, first in line {lines[here]}",
                    "keep one of them",
                    code="Q305",
                )
            lines[here] = key_node.start_mark.line + 1
            out[key] = _value(loader, value_node, here, lines, source, inside)
        return out
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            items.append(_value(loader, item, (*path, index), lines, source, inside))
        return items
    value = loader.construct_object(node)
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise ConfigError(
            where / dotted(path), f"{type(value).__name__} is no configuration value", "quote it", code="Q302"
        )
    return value
