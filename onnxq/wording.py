"""Text of values and messages. Messages name parameters as Python does: `force=True` in backticks.

The command line replaces these by its options. Only printed text is translated; stored values keep Python's names.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar


class Word(str, Enum):
    """A value that messages and files show as its text."""

    __str__ = str.__str__


# Characters of one field and of all in the short form of a value.
_FIELD = 60
_WHOLE = 500
T = TypeVar("T")
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


def format_counts(counts: Mapping[Any, int]) -> str:
    """Format numbers of things by their names: 3 Conv, 1 Gemm."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def join_names(names: Iterable[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    known = list(names)
    text = ", ".join(known[:most])
    return f"{text} and {len(known) - most} more" if len(known) > most else text


def format_shape(shape: Iterable[object]) -> str:
    """The sizes of a tensor: Nx3x224x224, "?" for one that is not known."""
    return "x".join(str(size or "?") for size in shape)


def group_by_text(
    items: Iterable[T], describe: Callable[[T], str]
) -> tuple[tuple[str, tuple[T, ...]], ...]:
    """Group items by what is said of them, the most frequent text first."""
    groups = defaultdict(list)
    for item in items:
        groups[describe(item)].append(item)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return tuple((text, tuple(members)) for text, members in ordered)


def list_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are: `dataclasses.asdict` copies them, and all inside them."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def abbreviate(value: Any) -> str:
    """A dataclass in a line: texts and numbers as they are, of collections the length, of other values the class.

    It is the `__repr__` of classes whose fields may hold thousands of values. Empty fields are left out.
    """
    parts = [
        f"{name}={_abbreviate_field(field_value)}"
        for name, field_value in list_fields(value).items()
        if field_value is not None and not (isinstance(field_value, Sized) and not len(field_value))
    ]
    return _cut(f"{type(value).__name__}({', '.join(parts)}", _WHOLE) + ")"


def show_html(value: Any) -> str:
    """The summary of a result as HTML, for notebooks: the `_repr_html_` of results."""
    # By its name: this room is below all others, and a notebook has loaded the package.
    return str(sys.modules["onnxq"].render_html(value))


def show_as_summary(kind: type[T]) -> type[T]:
    """A dataclass that is shown in a line, and in notebooks by its summary."""
    kind.__repr__ = abbreviate  # type: ignore[method-assign]
    kind._repr_html_ = show_html  # type: ignore[attr-defined]
    return kind


def _abbreviate_field(value: object) -> str:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (str, int, float)):
        return _cut(repr(value), _FIELD)
    return f"<{len(value)}>" if isinstance(value, Sized) else f"{type(value).__name__}(…)"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
