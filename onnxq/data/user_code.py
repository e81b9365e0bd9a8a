"""A person's own functions: what goes wrong in them is told as theirs, with file, line and the way there."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxq.errors import DataError, OnnxqError

_PACKAGE = os.path.join(Path(__file__).parents[1], "")
# Calls shown of a traceback, the innermost ones.
_CALLS = 5


@contextmanager
def user_code(where: str, folder: Path | None = None) -> Iterator[None]:
    """Run a person's own code: what it raises becomes a DataError, its file's neighbours can be imported.

    where: the function, as its owner names it. folder: its file's.
    """
    # In full: Python remembers what "." was when it first looked there.
    beside = "" if folder is None else os.path.abspath(folder)
    added = bool(beside) and beside not in sys.path
    if added:
        sys.path.insert(0, beside)
    try:
        yield
    except OnnxqError:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        cause = f"called sys.exit({code}){_calls(error)}"
        raise DataError(
            where, cause, "let the function return its result, or raise an exception", code="Q213"
        ) from error
    except Exception as error:
        told = f"{type(error).__name__}: {error}".strip().removesuffix(":")
        raise DataError(where, f"raised {told}{_calls(error)}", "mend that code", code="Q213") from error
    finally:
        if added and beside in sys.path:
            sys.path.remove(beside)


def _calls(error: BaseException) -> str:
    """The innermost calls in the person's code and below it, a line each with file, line and source."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [k for k, frame in enumerate(frames) if not _is_ours(frame.filename)]
    shown = [frame for frame in frames[theirs[0] :] if not frame.filename.startswith("<frozen ")] if theirs else []
    lines = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}" for frame in shown[-_CALLS:]]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return "".join(f"\n    at {line.rstrip(': ')}" for line in lines)


def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen "))
