"""Translation of messages, which name parameters as Python does: `force=True` in backticks.

The command line replaces these by its options. Only printed text is translated; stored values keep Python's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
