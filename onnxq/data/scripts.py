"""Data from a person's own Python file, and from Polygraphy's JSON."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.data.fit import Array
from onnxq.errors import DataError, OnnxqError
from onnxq.nearest import did_you_mean

# What Polygraphy calls the function of a data-loader script.
DEFAULT_FUNCTION = "load_data"


def call(path: Path, function: str) -> Any:
    """What `function` of the file returns. The file is run, so only ever one the person named.

    Raises DataError for a file that does not run, a function that is not there or wants arguments.
    """
    where = f"{path}:{function}"
    found = find_function(path, function)
    wants = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in wants):
        raise DataError(where, "the function wants arguments; it is called without", "give them defaults", code="Q213")
    with user_code(where, path.parent):
        return found()


def find_function(path: Path, function: str) -> Callable[..., Any]:
    """The function of a file, which is run for that. DataError when it does not run or has no such function."""
    where = f"{path}:{function}"
    with user_code(where, path.parent):
        spec = importlib.util.spec_from_file_location(f"_onnxq_data_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise DataError(path, "is not a Python file", code="Q213")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[spec.name]
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None or not callable(found):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise DataError(where, "the file has no such function", did_you_mean(function, names), code="Q213")
    return found


@contextmanager
def user_code(where: str, folder: Path | None = None) -> Iterator[None]:
    """Run a person's own code: what it raises is told as a fault of theirs, its file's neighbours can be imported."""
    added = folder is not None and str(folder) not in sys.path
    if added:
        sys.path.insert(0, str(folder))
    try:
        yield
    except OnnxqError:
        raise
    except Exception as error:
        raise DataError(where, f"raised {type(error).__name__}: {error}", "mend that code", code="Q213") from error
    finally:
        if added and str(folder) in sys.path:
            sys.path.remove(str(folder))


def feeds_from_json(path: Path) -> Sequence[Mapping[str, Array]]:
    """The feeds of a Polygraphy inputs file (`polygraphy run --save-inputs`): a list of {name: array}.

    Decoded here, without Polygraphy and without unpickling. Raises DataError for anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=lambda found: _decoded(found, path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            path, f"is not JSON ({error})", "make it with `polygraphy run --save-inputs`", code="Q206"
        ) from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})", code="Q202") from error
    feeds = content if isinstance(content, list) else [content]
    for feed in feeds:
        if not isinstance(feed, dict) or not all(isinstance(value, np.ndarray) for value in feed.values()):
            raise DataError(
                path, "is not a list of {input name: array}", "make it with `polygraphy run --save-inputs`", code="Q206"
            )
    if not feeds:
        raise DataError(path, "is empty: it has no samples", "give it at least one sample", code="Q203")
    return feeds


def _decoded(found: dict[str, Any], path: Path) -> Any:
    """An array where Polygraphy wrote one: {"array": base64 of a .npy, "polygraphy_class": "ndarray"}."""
    marker = found.get("polygraphy_class")
    if marker is None and "__polygraphy_encoded_ndarray" in found:
        marker = "ndarray"
    if marker is None:
        return found
    if marker != "ndarray" or not isinstance(found.get("array"), str):
        raise DataError(
            path, f"holds a Polygraphy {marker}, not input arrays", "save inputs as numpy arrays", code="Q206"
        )
    try:
        data = base64.b64decode(found["array"].encode(), validate=True)
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise DataError(
            path, f"holds an array that cannot be decoded ({error})", "make the file again", code="Q204"
        ) from error
