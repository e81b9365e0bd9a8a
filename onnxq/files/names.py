"""File names in text: Linux allows any bytes in a name; JSON, models and terminals require UTF-8."""

from __future__ import annotations

import re

# Python decodes a byte of a name that is not UTF-8 to one of these (PEP 383).
_SURROGATES = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Replace every byte of a file name that is not UTF-8 by the replacement character U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)
