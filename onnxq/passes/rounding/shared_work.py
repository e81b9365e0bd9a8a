"""Work on samples that is spread over the workers of a crew, and the files through which tensors go between them.

The unit of work is one sample, or one block of a sum: it depends on neither the number of workers nor their order, and
whoever adds results up does so in the order of the units. So the bytes are those of one process.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnxq.arrays import Array, Arrays, Shape, are_finite
from onnxq.files.access import make_write_error
from onnxq.numerics.machine import use_blas_threads
from onnxq.runtime.crew import Crew
from onnxq.workers import WorkPiece

T = TypeVar("T")
R = TypeVar("R")

# Pieces for each worker: one that is late does not keep the others waiting for long.
_EACH = 2


@dataclass(frozen=True)
class TensorFile:
    """A tensor in a file. finite: False where it holds NaN or inf."""

    path: str
    dtype: np.dtype[Any]
    shape: Shape
    finite: bool

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


Tensor = Array | TensorFile


def read_tensor(value: Tensor) -> Array:
    """The values, read where they are in a file."""
    if not isinstance(value, TensorFile):
        return value
    values: Array = np.load(value.path, allow_pickle=False)
    # Numpy's files know neither text as objects nor the narrow types.
    return values.astype(object) if value.dtype.kind == "O" else values.view(value.dtype)


def write_tensor(path: str, value: Array) -> TensorFile:
    """Write a tensor to a file, which appears whole or not at all. Raises OutputError where there is no room."""
    # ORT hands strings over as objects, which numpy would pickle.
    stored = np.asarray(value, str) if value.dtype.kind == "O" else value
    # Another process may write the same tensor at this moment.
    part = Path(f"{path}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.save(file, stored, allow_pickle=False)
        os.replace(part, path)
    except OSError as error:
        raise make_write_error(Path(path), error) from error
    finite = value.dtype.kind != "f" or are_finite(value)
    return TensorFile(path, value.dtype, value.shape, finite)


class SharedWork:
    """Workers, and a folder for the tensors between two pieces of a model, which `close` removes.

    one_thread: products of matrices are computed in one thread, as this process does it.
    """

    def __init__(self, crew: Crew, *, one_thread: bool) -> None:
        self.crew = crew
        self._one_thread = one_thread
        self._folder = crew.make_folder()
        self._numbers = count()

    def make_path(self) -> str:
        """The path of a file that there was none of yet."""
        return str(self._folder / str(next(self._numbers)))

    def put_sample(self, feeds: Arrays) -> dict[str, TensorFile]:
        """Put one sample into the folder."""
        return {
            name: write_tensor(self.make_path(), np.asarray(value)) for name, value in feeds.items()
        }

    def map(self, title: str, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        """Yield the result of every task in order. function: of a module."""
        size = max(1, -(-len(tasks) // (_EACH * self.crew.workers.count)))
        parts = [tuple(tasks[first : first + size]) for first in range(0, len(tasks), size)]
        pieces = [WorkPiece(title, _Tasks(function, part, self._one_thread)) for part in parts]
        for results in self.crew.map(_do_tasks, pieces):
            yield from results

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class _Tasks:
    function: Callable[[Any], Any]
    tasks: tuple[Any, ...]
    one_thread: bool


def _do_tasks(piece: _Tasks) -> list[Any]:
    with use_blas_threads(one=piece.one_thread):
        return [piece.function(task) for task in piece.tasks]
