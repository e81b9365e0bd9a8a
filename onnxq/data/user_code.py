"""Functions of the user: errors in them become DataErrors with file, line and calls."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxq.errors import DataError, OnnxqError

_PACKAGE = os.path.join(Path(__file__).parents[1], "")
# Calls of a traceback that a message shows, the innermost ones.
_CALLS = 5


@contextmanager
def guard_user_code(where: str, folder: Path | None = None) -> Iterator[None]:
    """Run code of the user: its exceptions become DataErrors, and it can import files beside its own.

    where: name of the function for messages. folder: folder of its file.
    """
    # Absolute: Python caches the contents of "." as it was when first searched.
    beside = "" if folder is None else os.path.abspath(folder)
    added = bool(beside) and beside not in sys.path
    if added:
        sys.path.insert(0, beside)
    # Nothing is written beside the user's files, Python's bytecode neither.
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    except OnnxqError:  # has its subject and fix already
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        fix = "let the function return its result, or raise an exception"
        raise DataError(where, f"called sys.exit({code})", fix, code="Q213", details=_format_calls(error)) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
        first, *rest = text.splitlines()
        details = (*rest, *_format_calls(error))
        raise DataError(where, f"raised {first}", "mend that code", code="Q213", details=details) from error
    finally:
        sys.dont_write_bytecode = bytecode
        if added and beside in sys.path:
            sys.path.remove(beside)


def _format_calls(error: BaseException) -> list[str]:
    """Format the innermost calls in the user's code and below it, one line each with file, line and source."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [k for k, frame in enumerate(frames) if not _is_ours(frame.filename)]
    shown = [frame for frame in frames[theirs[0] :] if not frame.filename.startswith("<frozen ")] if theirs else []
    lines = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}" for frame in shown[-_CALLS:]]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return [f"at {line.rstrip(': ')}" for line in lines]


def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen "))
