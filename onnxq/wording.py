"""Messages name parameters as Python does, in backticks: `force=True`. Who speaks another language translates them.

The command line shows its options. Translation is for showing only; values keep the words of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Translate = Callable[[str], str]
_SPEECH: ContextVar[Translate] = ContextVar("onnxq_speech", default=str)


def phrase(text: str) -> str:
    """The text as the reader knows its parameters."""
    return _SPEECH.get()(text)


@contextmanager
def speaking(translate: Translate) -> Iterator[None]:
    """Show texts through `translate` while the context lasts."""
    token = _SPEECH.set(translate)
    try:
        yield
    finally:
        _SPEECH.reset(token)
