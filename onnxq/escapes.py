"""Text of files in messages: a model's names may hold any character, those that steer a terminal or a CI system, too.

They are escaped where text is made, `\\x1b`, `\\n`; values keep them.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Bytes of a file name that are not UTF-8, as Python decodes them (PEP 383): no output can hold them.
_SURROGATES = re.compile("[\ud800-\udfff]")
# Controls of both sets, and what changes the direction of text or ends a line ("Trojan Source", CVE-2021-42574).
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Commands that GitHub, Azure and TeamCity take from a log: `::add-mask::x` at the start of a line, `##vso[…]` anywhere.
_COMMANDS = re.compile(r"^(?P<start>\s*):(?=:)|#(?=#\w*\[)", re.MULTILINE)


def replace_surrogates(text: str) -> str:
    """Replace every byte of a file name that is not UTF-8 by the replacement character U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def escape_line(text: str) -> str:
    """Escape a name, or a line that holds names: the result is one line without controls."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], replace_surrogates(text))


def escape_lines(text: str) -> str:
    """Escape a text of several lines of our own before it is printed: in none of them there is a control or command."""
    lines = "\n".join(map(escape_line, text.split("\n")))
    return _COMMANDS.sub(lambda match: f"{match['start'] or ''}\\x{ord(match[0][-1]):02x}", lines)


def escape_json(document: str) -> str:
    """Escape the strings of a JSON document, by JSON's own escapes; it stays the same document."""
    controls = _CONTROLS.sub(
        lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", replace_surrogates(document)
    )
    return _COMMANDS.sub(lambda match: f"\\u{ord(match[0][-1]):04x}", controls)


def dump_json(value: Any) -> str:
    """Convert plain values to a JSON document that may be printed."""
    return escape_json(json.dumps(value, indent=1, allow_nan=False))
