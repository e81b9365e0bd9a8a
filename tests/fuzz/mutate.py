"""Seeded damage to bytes, text and trees (what JSON and YAML hold); the same generator gives the same damage."""

import copy
from collections.abc import Callable
from random import Random
from typing import Any

# Lengths, tags and counts of binary formats live in single bytes: their extremes do more than random ones.
_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF)
_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_DEEP = 3000

TEXTS = (
    "", " ", "x", "*", "\0", "a\0b", "\n", "\ud800", "é" * 3, "/(/", "../../x", "nan", "-1", "1e999", "null",
    "x" * 5000, "NaN", "[", "{}", "%s%n", "\u202e", "int8", "float", "ort", "true",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64,
    10**400, 0.5, -0.0, 1e-45, 1e-300, 1e38, 1e39, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 1.5,
)  # fmt: skip


def strange_value(rng: Random) -> Any:
    """A value of any JSON kind that a reader may not expect."""
    kind = rng.randrange(7)
    if kind <= 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((None, True, False))
    if kind == 4:
        return rng.choice(([], {}, [[]], [None], {"a": 1}, {"": {}}, [1, 2, 3], ["a", "b"], [[1, 2], [3]]))
    if kind == 5:
        return nested(rng.choice((10, 50, 150)), rng.choice(("list", "dict")))
    return [rng.choice(NUMBERS) for _ in range(rng.randrange(1, 70))]


def nested(depth: int, kind: str) -> Any:
    """A list in a list in a list …, or dicts."""
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def mutate_bytes(rng: Random, data: bytes, times: int | None = None) -> bytes:
    """`data` with a few places damaged: bits, extremes, pieces cut out, doubled, moved, or cut off behind."""
    out = bytearray(data)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3, 8))):
        if not out:
            return rng.randbytes(rng.randrange(16))
        at = rng.randrange(len(out))
        length = min(len(out) - at, rng.choice((1, 2, 4, 8, 16, 64, 256)))
        kind = rng.randrange(9)
        if kind <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.choice(_BYTES)
        elif kind == 3:
            word = rng.choice(_WORDS).to_bytes(8, rng.choice(("little", "big")))
            out[at : at + 4] = word[:4] if rng.random() < 0.5 else word[4:]
        elif kind == 4:
            del out[at : at + length]
        elif kind == 5:
            out[at:at] = rng.randbytes(length)
        elif kind == 6:
            piece = bytes(out[at : at + length])
            to = rng.randrange(len(out))
            out[to:to] = piece * rng.choice((1, 1, 2, 50))
        elif kind == 7:
            out[at : at + length] = bytes(length)
        else:
            del out[at:]
    return bytes(out)


def mutate_text(rng: Random, text: str) -> str:
    """`text` with lines dropped, doubled, moved or indented, and words or characters replaced by strange ones."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 2:
            lines[at] = rng.choice((" ", "\t", "  ", "\0", "﻿", "- ", "? ", "# ")) + lines[at]
        elif kind == 3:
            words = lines[at].split(" ")
            words[rng.randrange(len(words))] = str(rng.choice((*TEXTS[:17], *NUMBERS[:29])))
            lines[at] = " ".join(words)
        elif kind == 4:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice("\"'{}[]:,&*!|>%@`\0\x1b\x85é0-") + lines[at][place:]
        elif kind == 5:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place]
        elif kind == 6:
            del lines[at + 1 :]
        else:
            lines[at] = rng.choice(
                ("[" * _DEEP, "{" * 200, '{"a":' * _DEEP, "9" * 5000, "- " * 300, "1e999", "-Infinity")
            )
        text = "\n".join(lines)
    return text


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree of dicts and lists."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        here = waiting.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in items:
            found.append((here, key))
            if isinstance(value, (dict, list)):
                waiting.append(value)
    return found


def mutate_tree(rng: Random, tree: Any, *, times: int | None = None) -> Any:
    """A copy of a tree with a few entries replaced, removed, renamed, added, doubled, exchanged or nudged."""
    tree = copy.deepcopy(tree)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        found = places(tree)
        if not found:
            return strange_value(rng)
        # A number in a long array is one of thousands: choose the container first now and then.
        if rng.random() < 0.6:
            containers = list({id(here): here for here, _ in found}.values())
            chosen = rng.choice(containers)
            found = [(here, key) for here, key in found if here is chosen]
        here, key = rng.choice(found)
        rng.choice(_TREE_EDITS)(rng, here, key, tree)
    return tree


def _replace(rng: Random, here: Any, key: Any, tree: Any) -> None:
    here[key] = strange_value(rng)


def _remove(rng: Random, here: Any, key: Any, tree: Any) -> None:
    del here[key]


def _rename(rng: Random, here: Any, key: Any, tree: Any) -> None:
    if isinstance(here, dict):
        here[rng.choice((*TEXTS[:16], str(key).upper(), f"{key}s"))] = here.pop(key)
    else:
        here.insert(rng.randrange(len(here) + 1), here.pop(key))


def _add(rng: Random, here: Any, key: Any, tree: Any) -> None:
    value = strange_value(rng) if rng.random() < 0.5 else copy.deepcopy(here[key])
    if isinstance(here, dict):
        here[rng.choice(TEXTS)] = value
    else:
        here.insert(rng.randrange(len(here) + 1), value)


def _exchange(rng: Random, here: Any, key: Any, tree: Any) -> None:
    other, name = rng.choice(places(tree))
    here[key] = copy.deepcopy(other[name])


def _nudge(rng: Random, here: Any, key: Any, tree: Any) -> None:
    value = here[key]
    if isinstance(value, bool):
        here[key] = not value
    elif isinstance(value, (int, float)):
        # Greater integers are neither floats nor text.
        value = value if -1e300 < value < 1e300 else 1
        here[key] = rng.choice((value + 1, value - 1, -value, value * 2, value * 1e6, float(value), str(value)))
    elif isinstance(value, str):
        here[key] = rng.choice(
            (value[:-1], value + "x", value.upper(), value + "\0", value * 2, [value], {value: value})
        )
    elif isinstance(value, list):
        here[key] = rng.choice((value[:-1], value * 2, [value], value[::-1], _many(value)))
    else:
        here[key] = [value]


def _many(value: list[Any]) -> list[Any]:
    """The first entry 300 times, unless that would make a file of megabytes."""
    return value[:1] * (1 if value and isinstance(value[0], (list, dict)) else 300)


_TREE_EDITS: tuple[Callable[[Random, Any, Any, Any], None], ...] = (
    _replace, _replace, _remove, _rename, _add, _exchange, _nudge, _nudge,
)  # fmt: skip
