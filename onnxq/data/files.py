"""Opening of data files and folders by their kind."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from onnxq.config import DataConfig
from onnxq.data.arrays import load_npy, load_npz
from onnxq.data.fit import Array
from onnxq.data.images import SUFFIXES, find_images, open_images
from onnxq.data.protobuf import find_sets, read_set, read_tensor
from onnxq.data.scripts import read_json_feeds, suggest_files
from onnxq.data.sources import ArraySource, JoinedSource, LazySource, Source
from onnxq.data.spool import spool_samples
from onnxq.data.text import make_text_samples
from onnxq.errors import DataError
from onnxq.files import check_input_kind
from onnxq.graph import ModelLike, ValueInfo

# Files that are text whatever the configuration says; with a tokenizer all others are, too.
_TEXT = frozenset({".txt", ".text", ".md", ".rst"})
# For messages: everything that `load_data` reads from a path.
_KINDS = (
    ".npz, .npy, .pb or Polygraphy .json files, folders of them, ONNX test_data_set_* folders, folders of images, "
    "script.py[:function], or text with a tokenizer"
)


def open_path(
    path: Path,
    inputs: Sequence[ValueInfo],
    config: DataConfig,
    model: ModelLike | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Source:
    """Open the samples at a path.

    model: fills the caches of samples of text. tick: called for each of these.
    Raises DataError for a path that does not exist, is unreadable or of unknown kind, and inputs that hold no tensor.
    """
    for value in inputs:
        if not value.dtype:
            cause = "is a sequence, a map or an optional value, and files of samples hold tensors"
            raise DataError(f"input {value.name!r}", cause, "export the model with tensors for inputs", code="Q206")
    try:
        return _open_any(path, inputs, config, model, tick)
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error})"
        raise DataError(path, cause, "check its permissions", code="Q202") from error


def _open_any(
    path: Path, inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike | None, tick: Callable[[], None]
) -> Source:
    if os.path.isdir(path):
        return _open_folder(path, inputs, config)
    if not os.path.exists(path):
        raise DataError(path, "there is no such file or folder", suggest_files(path), code="Q201")
    if not os.path.isfile(path):
        check_input_kind(path, DataError)
    reader = _READERS.get(path.suffix.lower())
    if reader is not None:
        return reader(path, inputs)
    if path.suffix.lower() in SUFFIXES:
        return open_images([path], path.parent, inputs, config.images)
    if config.tokenizer or path.suffix.lower() in _TEXT:
        return spool_samples(make_text_samples(path, inputs, config, model), inputs, path.name, None, tick)
    raise DataError(path, "is of no kind that samples are read from", f"use {_KINDS}", code="Q206")


def _open_npz(path: Path, inputs: Sequence[ValueInfo]) -> Source:
    return ArraySource(load_npz(path), inputs, path.name)


def _open_npy(path: Path, inputs: Sequence[ValueInfo]) -> Source:
    if len(inputs) != 1:
        cause = f"holds one array, the model has {len(inputs)} inputs: {', '.join(value.name for value in inputs)}"
        raise DataError(path, cause, "use a .npz file", code="Q207")
    return ArraySource({inputs[0].name: load_npy(path)}, inputs, path.name)


def _open_pb(path: Path, inputs: Sequence[ValueInfo]) -> Source:
    name, array = read_tensor(path)
    alone = name if len(inputs) != 1 else inputs[0].name
    return ArraySource({alone: array}, inputs, path.name, feed=True)


def _open_json(path: Path, inputs: Sequence[ValueInfo]) -> Source:
    feeds = read_json_feeds(path)
    named = ((f"{path.name}, item {k}", feed) for k, feed in enumerate(feeds))
    return JoinedSource([ArraySource(feed, inputs, where, feed=True) for where, feed in named])


_READERS: dict[str, Callable[[Path, Sequence[ValueInfo]], Source]] = {
    ".npz": _open_npz,
    ".npy": _open_npy,
    ".pb": _open_pb,
    ".json": _open_json,
}


def _open_folder(folder: Path, inputs: Sequence[ValueInfo], config: DataConfig) -> Source:
    sets = find_sets(folder)
    files = sorted((p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")), key=_make_sort_key)
    kinds = {suffix: [p for p in files if p.suffix.lower() == suffix] for suffix in (".npz", ".npy", ".json")}
    # One folder per input is a layout of its own; see `_open_input_folders`.
    by_input = {value.name: folder / _to_file_name(value.name) for value in inputs}
    images = find_images(folder)
    arrays = bool(sets or kinds[".npz"] or kinds[".npy"])
    layouts: list[tuple[str, bool, Callable[[], Source]]] = [
        ("ONNX test data (input_*.pb)", bool(sets), lambda: _open_sets(sets, inputs)),
        (".npz files", bool(kinds[".npz"]), lambda: JoinedSource([_open_npz(path, inputs) for path in kinds[".npz"]])),
        (".npy files", bool(kinds[".npy"]), lambda: _open_npy_files(folder, kinds[".npy"], inputs)),
        (
            "a folder for each input",
            all(path.is_dir() for path in by_input.values()),
            lambda: _open_input_folders(by_input, inputs, str(folder)),
        ),
        (
            "images",
            # Beside arrays they show what these are of, unless the configuration says how to read them.
            bool(images) and (config.images is not None or not arrays),
            lambda: open_images(images, folder, inputs, config.images),
        ),
        (
            "Polygraphy .json files",
            bool(kinds[".json"]) and not (arrays or images),
            lambda: JoinedSource([_open_json(path, inputs) for path in kinds[".json"]]),
        ),
    ]
    found = [(kind, opener) for kind, there, opener in layouts if there]
    if not found:
        raise DataError(folder, "is empty: there are no samples in it", f"use {_KINDS}", code="Q203")
    # Taking one of several kinds would leave the others out silently.
    if len(found) > 1:
        cause = f"holds {' and '.join(kind for kind, _ in found)}"
        raise DataError(folder, cause, "keep one kind of samples in a folder", code="Q206")
    return found[0][1]()


def _open_sets(sets: Sequence[Path], inputs: Sequence[ValueInfo]) -> Source:
    return LazySource(sets, lambda path: read_set(path, inputs), lambda path: str(path.name))


def _open_npy_files(folder: Path, files: Sequence[Path], inputs: Sequence[ValueInfo]) -> Source:
    """Open .npy files: one array per input if they are named after the inputs, else all samples of the only input."""
    named = {_to_file_name(value.name): value.name for value in inputs}
    if all(stem in {p.stem for p in files} for stem in named):
        arrays: dict[str, Array] = {named.get(path.stem, path.stem): load_npy(path) for path in files}
        return ArraySource(arrays, inputs, folder.name)
    if len(inputs) != 1:
        cause = f"has no .npy file for each input ({', '.join(f'{stem}.npy' for stem in named)})"
        fix = "name the files after the inputs, or use .npz files with one array per input"
        raise DataError(folder, cause, fix, code="Q207")
    return JoinedSource([_open_npy(path, inputs) for path in files])


def _open_input_folders(by_input: dict[str, Path], inputs: Sequence[ValueInfo], where: str) -> Source:
    """Open input_name/0001.npy …: the k-th files of all folders form one item."""
    listed = {name: sorted(path.glob("*.npy"), key=_make_sort_key) for name, path in by_input.items()}
    counts = {name: len(files) for name, files in listed.items()}
    if len(set(counts.values())) != 1 or not next(iter(counts.values()), 0):
        told = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
        raise DataError(where, f"the inputs' folders do not hold the same number of .npy files: {told}", code="Q212")
    rows = [dict(zip(listed, row, strict=True)) for row in zip(*listed.values(), strict=True)]
    items = (({name: load_npy(path) for name, path in row.items()}, next(iter(row.values())).name) for row in rows)
    return JoinedSource([ArraySource(arrays, inputs, label) for arrays, label in items])


def _to_file_name(name: str) -> str:
    """Convert an input's name to a file name: characters that a file system may refuse become "_"."""
    return re.sub(r"[^\w.-]", "_", name)


def _make_sort_key(path: Path) -> list[tuple[int, int, str]]:
    """Make a key that sorts 2.npy before 10.npy."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
