"""Text of values and messages. Messages name parameters as Python does: `force=True` in backticks.

The command line replaces these by its options. Only printed text is translated; stored values keep Python's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from enum import Enum
from typing import Any

# Characters of one field and of all in the short form of a value.
_FIELD, _WHOLE = 60, 500
Translate = Callable[[str], str]
# Per context: a command that runs in a thread of a program must not change that program's messages.
_SPEECH: ContextVar[Translate] = ContextVar("onnxq_speech", default=str)


def translate_text(text: str) -> str:
    """Translate a text for its reader."""
    return _SPEECH.get()(text)


@contextmanager
def use_translation(translate: Translate) -> Iterator[None]:
    """Translate texts by `translate` inside the context."""
    token = _SPEECH.set(translate)
    try:
        yield
    finally:
        _SPEECH.reset(token)


def abbreviate(value: Any) -> str:
    """A dataclass in a line: texts and numbers as they are, of collections the length, of other values the class.

    It is the `__repr__` of classes whose fields may hold thousands of values. Empty fields are left out.
    """
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    parts = [f"{name}={_abbreviate_field(one)}" for name, one in held.items() if not _is_empty(one)]
    return _cut(f"{type(value).__name__}({', '.join(parts)}", _WHOLE) + ")"


def _is_empty(held: object) -> bool:
    return held is None or (isinstance(held, Sized) and not len(held))


def _abbreviate_field(held: object) -> str:
    if isinstance(held, Enum):
        return str(held)
    if isinstance(held, (str, int, float)):
        return _cut(repr(held), _FIELD)
    return f"<{len(held)}>" if isinstance(held, Sized) else f"{type(held).__name__}(…)"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
