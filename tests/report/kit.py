"""Shows a report as text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


def shown(show: Callable[..., None], *values: Any, width: int | None = 80, **options: Any) -> str:
    """What `show` prints to its stream, 80 columns wide; width None: as in a pipe."""
    out = io.StringIO()
    show(*values, stream=out, width=width, **options)
    return out.getvalue()


def warned(show: Callable[..., None], *values: Any, **options: Any) -> tuple[str, str]:
    """What `show` prints to its stream and to the stream of warnings."""
    out, err = io.StringIO(), io.StringIO()
    show(*values, stream=out, errors=err, width=80, **options)
    return out.getvalue(), err.getvalue()
