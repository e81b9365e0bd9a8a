"""Names of files in text: Linux takes any bytes for a name, JSON, models and terminals take UTF-8."""

from __future__ import annotations

import re

_SURROGATES = re.compile("[\ud800-\udfff]")


def readable(text: str) -> str:
    """The text with a replacement character in the place of each byte of a file's name that is not UTF-8."""
    return _SURROGATES.sub("\ufffd", text)
