"""Shows a report as text."""

import io
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from onnxq.report.terminal import TextView, print_renderable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(show: Callable[..., None], found: Any, *, width: int | None = 80, **options: Any) -> str:
    """The text that `show` prints; width: in columns, None: as in a pipe. options: of a TextView, or of `show`."""
    out = io.StringIO()
    show(found, make_view(options, stream=out, width=width), **options)
    return out.getvalue()


def printed(content: Any, *, width: int | None = 80) -> str:
    """A table or sheet as text."""
    out = io.StringIO()
    print_renderable(content, out, width)
    return out.getvalue()


def warned(show: Callable[..., None], found: Any, **options: Any) -> tuple[str, str]:
    """The texts that `show` prints to its stream and to the stream of warnings."""
    out, err = io.StringIO(), io.StringIO()
    show(found, make_view(options, stream=out, errors=err, width=80), **options)
    return out.getvalue(), err.getvalue()


def make_view(options: dict[str, Any], **more: Any) -> TextView:
    """A TextView of those of the options that are its own; they are taken out."""
    own = {one.name: options.pop(one.name) for one in fields(TextView) if one.name in options}
    return TextView(**own, **more)
