"""Data from a Python file of the user, whose errors are told with their place, and from Polygraphy's JSON."""

import base64
import importlib.util
import inspect
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import Array, Arrays
from onnxq.data.fit import refuse_empty
from onnxq.errors import DataError, OnnxqError, suggest_files, suggest_names
from onnxq.files import check_input_kind, explain_unreadable, read_input
from onnxq.sites import JsonObject

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
    bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    except OnnxqError:  # has its subject and fix already
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        fix = "let the function return its result, or raise an exception"
        raise DataError(
            where, f"called sys.exit({code})", fix, code="Q213", details=_format_calls(error)
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
        first, *rest = text.splitlines()
        details = (*rest, *_format_calls(error))
        raise DataError(
            where, f"raised {first}", "mend that code", code="Q213", details=details
        ) from error
    finally:
        sys.dont_write_bytecode = bytecode
        if added and beside in sys.path:
            sys.path.remove(beside)


def _format_calls(error: BaseException) -> list[str]:
    """Format the innermost calls in the user's code and below it, one line each with file, line and source."""
    # Frozen modules are Python's own importing of the file.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
    ]
    calls = list(dropwhile(lambda frame: frame.filename.startswith(_PACKAGE), frames))[-_CALLS:]
    lines = [
        f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}" for frame in calls
    ]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return [f"at {line.rstrip(': ')}" for line in lines]


_SAVE_INPUTS = "make it with `polygraphy run --save-inputs`"
# Polygraphy's name for the function of a data-loader script.
DEFAULT_FUNCTION = "load_data"
# Bytes; far more than lists of samples take that people write as JSON.
_MOST_BYTES = 2**31
# Bytes; a larger file is no script but something named by mistake.
_LONGEST_SCRIPT = 16 * 2**20


def call_function(path: Path, function: str) -> Any:
    """Call `function` of the file and return its result. This runs the file, so it must be one that the user named.

    Raises DataError for a file that does not run, and for a function that does not exist or has required arguments.
    """
    where = f"{path}:{function}"
    loader = find_function(path, function)
    wants = [p for p in inspect.signature(loader).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in wants):
        raise DataError(
            where,
            "the function wants arguments; it is called without",
            "give them defaults",
            code="Q213",
        )
    with guard_user_code(where, path.parent):
        return loader()


def find_function(path: Path, function: str) -> Callable[..., Any]:
    """Run a file and return its function. Raises DataError if it does not run or has no such function."""
    where = f"{path}:{function}"
    _check_script(path)
    with guard_user_code(where, path.parent):
        spec = importlib.util.spec_from_file_location(f"_onnxq_data_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise DataError(path, "is not a Python file", code="Q213")
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickle look their module up by name while it is executed.
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[spec.name]
    loader: Callable[..., Any] | None = getattr(module, function, None)
    if loader is None or not callable(loader):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise DataError(
            where, "the file has no such function", suggest_names(function, names), code="Q213"
        )
    return loader


def _check_script(path: Path) -> None:
    """Raise DataError for a file that does not exist, with the nearest names, or that is no regular file."""
    try:
        check_input_kind(path, DataError)
        if path.stat().st_size > _LONGEST_SCRIPT:
            cause = f"is larger than {_LONGEST_SCRIPT // 2**20} MiB"
            raise DataError(path, cause, "name the right file", code="Q202")
    except FileNotFoundError:
        raise DataError(path, "there is no such file", suggest_files(path), code="Q201") from None
    except OSError as error:
        cause = explain_unreadable(error)
        raise DataError(path, cause, "check its permissions", code="Q213") from error


def read_json_feeds(path: Path) -> Sequence[Arrays]:
    """Read a Polygraphy inputs file (`polygraphy run --save-inputs`): a list of {name: array}.

    It is decoded without Polygraphy and without unpickling. Raises DataError for any other content.
    """
    try:
        text = read_input(path, DataError, limit=_MOST_BYTES).decode("utf-8")
        content = json.loads(text, object_hook=lambda entry: _decode_array(entry, path))
    # ValueError: no JSON, no text, numbers of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"is not JSON ({error})", _SAVE_INPUTS, code="Q206") from error
    except OSError as error:
        raise DataError(path, explain_unreadable(error), code="Q202") from error
    feeds = content if isinstance(content, list) else [content]
    for feed in feeds:
        if not isinstance(feed, dict) or not all(
            isinstance(value, np.ndarray) for value in feed.values()
        ):
            raise DataError(path, "is not a list of {input name: array}", _SAVE_INPUTS, code="Q206")
    if not feeds:
        raise refuse_empty(path)
    return feeds


def _decode_array(content: JsonObject, path: Path) -> Any:
    """Decode an array in Polygraphy's form: {"array": base64 of a .npy, "polygraphy_class": "ndarray"}."""
    marker = content.get("polygraphy_class")
    # The form that older versions of Polygraphy wrote.
    if marker is None and "__polygraphy_encoded_ndarray" in content:
        marker = "ndarray"
    if marker is None:
        return content
    if marker != "ndarray" or not isinstance(content.get("array"), str):
        cause = f"holds a Polygraphy {marker}, not input arrays"
        raise DataError(path, cause, "save inputs as numpy arrays", code="Q206")
    try:
        return decode_array(content["array"])
    except Exception as error:  # numpy parses a header that anybody may have written: whatever it says, it is no array
        cause = f"holds an array that cannot be decoded ({error})"
        raise DataError(path, cause, "make the file again", code="Q204") from error


def decode_array(text: str) -> Array:
    """The array that Polygraphy wrote as base64 of a .npy, never unpickled. Any Exception for other text."""
    array: Array = np.load(
        io.BytesIO(base64.b64decode(text.encode(), validate=True)), allow_pickle=False
    )
    return array


def encode_array(array: Array) -> str:
    """The array as base64 of a .npy, as Polygraphy writes it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
