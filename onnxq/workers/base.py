"""Pieces of work and their results in order, whoever does them, and the folder that interrupted work goes on from."""

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import ml_dtypes  # noqa: F401 (numpy knows its types by name from here on)
import numpy as np

from onnxq.arrays import Bytes
from onnxq.errors import ConfigError
from onnxq.files import make_folder, replace_files

# Finished pieces in a folder, one file each, from which interrupted work goes on.
# Their values become JSON and arrays and come back exactly, without pickle: reading a file of results runs no code in
# it.

_Class = TypeVar("_Class", bound=type)
# By name; filled by `register_packed`.
_CLASSES: dict[str, type] = {}


def register_packed(kind: _Class) -> _Class:
    """Let values of a class be packed by their attributes (decorator)."""
    _CLASSES[kind.__name__] = kind
    return kind


def pack_value(value: Any) -> tuple[str, list[Bytes]]:
    """Return JSON, and the bytes of the arrays that it refers to by number.

    value: numbers, text, arrays, fractions, lists, tuples, mappings by text or integers, and objects whose attributes
    are of these.
    Raises ConfigError for anything else.
    """
    arrays: list[Bytes] = []
    return json.dumps(_pack(value, arrays), separators=(",", ":")), arrays


def unpack_value(text: str, arrays: Sequence[Bytes]) -> Any:
    """Return the value that `pack_value` was given. Raises ValueError, KeyError or TypeError for other text."""
    return _unpack(json.loads(text), arrays)


def restore_object(fresh: Any, packed: Any) -> None:
    """Give an object the attributes that one of its class had; `packed` is that one, as `unpack_value` returns it."""
    if not isinstance(packed, Mapping) or not packed.keys() <= vars(fresh).keys():
        raise ValueError(f"these are not the numbers of a {type(fresh).__name__}")
    for name, value in packed.items():
        attribute = getattr(fresh, name)
        if isinstance(value, Mapping) and not isinstance(attribute, Mapping):
            restore_object(attribute, value)
        else:
            setattr(fresh, name, value)


def _pack(value: Any, arrays: list[Bytes]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # Exact, and JSON has no infinity.
        return {"float": value.hex()}
    if isinstance(value, Fraction):
        return {"fraction": str(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        # Text, as ONNX Runtime gives and takes it.
        return {"text": value.astype(str).ravel().tolist(), "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        # As bytes, since numpy's own files do not know the narrow types.
        content = np.ascontiguousarray(value).ravel().view(np.uint8)
        content.flags.writeable = False
        arrays.append(content)
        return {"array": len(arrays) - 1, "dtype": value.dtype.name, "shape": list(value.shape)}
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return {kind: [_pack(item, arrays) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return {"dict": [[key, _pack(item, arrays)] for key, item in value.items()]}
    if not hasattr(value, "__dict__") or isinstance(value, type):
        cause = f"keeps a {kind}, which cannot be written to a file"
        raise ConfigError(kind, cause, "keep numbers, arrays and objects of these", code="Q311")
    attributes = {name: item for name, item in vars(value).items() if not _is_fixed(item)}
    return {"object": kind, "of": _pack(attributes, arrays)}


def _is_fixed(value: Any) -> bool:
    """True for a frozen description, such as a QuantSpec, which a fresh object has already."""
    return (
        is_dataclass(value) and not isinstance(value, type) and type(value).__name__ not in _CLASSES
    )


def _unpack(tree: Any, arrays: Sequence[Bytes]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "float" in tree:
        return float.fromhex(tree["float"])
    if "fraction" in tree:
        return Fraction(tree["fraction"])
    if "text" in tree:
        return np.array(tree["text"], object).reshape(tree["shape"])
    if "array" in tree:
        # Whoever gets it may change it: what is not from a file of its own is copied.
        content = np.require(arrays[tree["array"]], requirements="W")
        return content.view(np.dtype(tree["dtype"])).reshape(tree["shape"])
    if "list" in tree:
        return [_unpack(item, arrays) for item in tree["list"]]
    if "tuple" in tree:
        return tuple(_unpack(item, arrays) for item in tree["tuple"])
    if "dict" in tree:
        return {key: _unpack(item, arrays) for key, item in tree["dict"]}
    attributes = _unpack(tree["of"], arrays)
    kind = _CLASSES.get(tree["object"])
    if kind is None:
        return attributes
    restored: Any = object.__new__(kind)
    if is_dataclass(kind) and not attributes.keys() >= {item.name for item in fields(kind)}:
        raise ValueError(f"these are not the fields of a {kind.__name__}")
    vars(restored).update(attributes)
    return restored


# Bytes; above it packing takes longer than writing.
_WORTH_PACKING = 2**24


def write_value(file: Path | BinaryIO, value: Any, *, compress: bool = False) -> None:
    """Write a value of `pack_value` to a new .npz, or to an open file. compress: its arrays, unless they are large."""
    text, arrays = pack_value(value)
    parts = {"value": np.frombuffer(text.encode(), np.uint8)}
    parts |= {f"a{k}": array for k, array in enumerate(arrays)}
    small = compress and sum(map(len, arrays)) < _WORTH_PACKING
    save: Any = np.savez_compressed if small else np.savez
    save(file, **parts)


def read_value(path: Path) -> Any:
    """The value that `write_value` wrote."""
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        text = bytes(file["value"]).decode()
        return unpack_value(text, [file[f"a{k}"] for k in range(len(file.files) - 1)])


_ENDING = ".piece"
# What reading a file raises that is damaged, or of another version.
_DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


class Journal:
    """The pieces in a folder, by their keys. A file appears whole or not at all, at whatever moment a run is killed.

    Raises OutputError for a folder that cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)
        self._earlier = {path.stem for path in folder.glob(f"*{_ENDING}")}
        self._used: set[str] = set()

    @property
    def earlier(self) -> int:
        """Number of pieces of earlier runs."""
        return len(self._earlier)

    @property
    def used(self) -> int:
        """Number of those that this run took."""
        return len(self._used)

    def holds(self, key: str) -> bool:
        """True where the piece is finished."""
        return bool(key) and self._find_path(key).exists()

    def read(self, key: str) -> Any:
        """Return the result of a piece; None where it is not finished, or its file is damaged."""
        try:
            value = read_value(self._find_path(key))
        except _DAMAGED:
            return None
        self._used |= {key} & self._earlier
        return value

    def write(self, key: str, value: Any) -> None:
        """Write the result of a piece. Raises OutputError where that fails, ConfigError for one that is not plain."""
        with replace_files([self._find_path(key)], overwrite=True) as files:
            # Histograms are mostly zeros; weights are not, and large.
            write_value(files[0], value, compress=True)

    def _find_path(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"


T = TypeVar("T")
R = TypeVar("R")
# (position among the pieces, result)
Finished = tuple[int, Any]

# Threads of a session of which no number is asked for; 0: all cores.
_threads: ContextVar[int] = ContextVar("onnxq_threads", default=0)


@dataclass(frozen=True)
class WorkPiece(Generic[T]):
    """One piece of work.

    title: for messages. task: the argument of the function, which can be pickled; large values stand in it as paths.
    key: hash of everything that the result depends on; "": never taken from an earlier run.
    """

    title: str
    task: T
    key: str = ""


# A piece with its position.
NumberedPiece = tuple[int, WorkPiece[T]]


class Workers:
    """Does pieces one after another in this process. count: pieces done at the same time.

    journal: the finished pieces of this run and of earlier ones; None: nothing is written.
    """

    count = 1

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal

    @property
    def plain(self) -> bool:
        """True where work in pieces gains nothing: there is one process, and nothing is kept of its results."""
        return self.count == 1 and self.journal is None

    def map(
        self,
        function: Callable[[T], R],
        pieces: Sequence[WorkPiece[T]],
        *,
        on_done: Callable[[WorkPiece[T]], None] = lambda _: None,
    ) -> Iterator[R]:
        """Yield the result of every piece, in the order of the pieces.

        function: a function of a module, which depends on nothing but its argument. on_done: called with each piece
        as its result arrives. Raises what the function raises for the first piece that fails, whoever ran ahead;
        WorkerError for a piece that workers die over.
        """
        results: dict[int, R] = {}
        journal = self.journal
        finished = {k for k, piece in enumerate(pieces) if journal and journal.holds(piece.key)}
        todo = [(k, piece) for k, piece in enumerate(pieces) if k not in finished]
        stream = self._finish_pieces(function, todo)
        for k, piece in enumerate(pieces):
            if journal and k in finished:
                result = journal.read(piece.key)
                # A damaged file: done again, here, since it is rare.
                results[k] = function(piece.task) if result is None else result
                on_done(piece)
            while k not in results:
                at, value = next(stream)
                if journal and pieces[at].key and not isinstance(value, _Failure):
                    journal.write(pieces[at].key, value)
                results[at] = value
                on_done(pieces[at])
            if isinstance(results[k], _Failure):
                raise results[k].error  # type: ignore[attr-defined]
            yield results.pop(k)

    def close(self) -> None:
        """End the workers."""

    def _finish_pieces(
        self, function: Callable[[T], R], todo: Sequence[NumberedPiece[T]]
    ) -> Iterator[Finished]:
        """Yield results as they arrive; a _Failure for a piece whose function raised."""
        for k, piece in todo:
            yield k, run_guarded(function, piece.task, count_threads())


@dataclass(frozen=True)
class _Failure:
    """An exception of a piece, which counts once all pieces before it have ended."""

    error: Exception


def run_guarded(function: Callable[[T], R], task: T, threads: int = 0) -> R | _Failure:
    """Return the result of a piece, or its exception as a value. Workers of every kind call this.

    threads: `count_threads` of the process that hands the piece out.
    """
    try:
        with use_threads(threads):
            return function(task)
    except Exception as error:
        return _Failure(error)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run sessions in so many threads inside, wherever no other number is asked for; 0: all cores.

    ONNX Runtime shares sums out among its threads, so that the last bits of a result depend on their number. It is the
    same in all workers, however many there are.
    """
    token = _threads.set(count)
    try:
        yield
    finally:
        _threads.reset(token)


def count_threads(requested: int = 0) -> int:
    """The number of threads of a session. requested: 0 for none in particular."""
    return requested or _threads.get()
