"""Loading of data of every kind: paths of files and folders, arrays, iterables and functions."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxq.arrays import Array, Arrays
from onnxq.config import DataConfig
from onnxq.data.arrays import load_npy, load_npz
from onnxq.data.dataset import Dataset, Unchosen, choose_items
from onnxq.data.fit import Feeds, Inputs, check_dtype, refuse_empty
from onnxq.data.images import SUFFIXES, find_images, open_images
from onnxq.data.scripts import DEFAULT_FUNCTION, call_function, guard_user_code, read_json_feeds
from onnxq.data.sources import (
    SampleSource,
    divide_arrays,
    join_sources,
    name_arrays,
    read_lazily,
    spool_samples,
)
from onnxq.data.synthetic import SAMPLES, make_synthetic
from onnxq.data.text import make_generated_samples, make_text_samples
from onnxq.errors import DataError, suggest_files
from onnxq.files import check_input_kind, explain_unreadable, read_input
from onnxq.graph import ModelLike
from onnxq.progress import Progress, Tick, silent

# Bytes; protobuf's limit for one message.
_MOST_BYTES = 2**31 - 1
_NUMBER = re.compile(r"input_\d+\.pb$")


def find_sets(folder: Path) -> list[Path]:
    """Find the folders with input_*.pb: `folder` itself or the test_data_set_* in it, in numeric order."""
    if _list_files(folder):
        return [folder]
    return sorted(filter(_list_files, folder.iterdir()), key=_make_sort_key)


def read_set(folder: Path, inputs: Inputs) -> Feeds:
    """Read one sample: tensors by their own names if these are the inputs' names, else in the order of the inputs.

    Raises DataError for a damaged file or if files and inputs do not match.
    """
    tensors = list(map(read_tensor, _list_files(folder)))
    names = [value.name for value in inputs]
    if dict(tensors).keys() == set(names):
        return dict(tensors)
    if len(tensors) != len(names):
        cause = f"has {len(tensors)} input files, the model has {len(names)} inputs ({', '.join(names)})"
        raise DataError(folder, cause, code="Q207")
    return {name: array for name, (_, array) in zip(names, tensors, strict=True)}


def read_tensor(path: Path) -> tuple[str, Array]:
    """Read name and values of a TensorProto file."""
    tensor = TensorProto()
    try:
        data = read_input(path, DataError, limit=_MOST_BYTES)
    except OSError as error:
        raise DataError(path, explain_unreadable(error), code="Q202") from error
    fix = "sequences and maps are not supported"
    try:
        tensor.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError; its package has no types
        raise DataError(path, "is not an ONNX tensor", fix, code="Q206") from error
    if tensor.data_location == TensorProto.EXTERNAL:
        raise DataError(
            path,
            "keeps its values in another file",
            "save the tensor with its values inside",
            code="Q204",
        )
    # Values of a sequence stand where a tensor tells its segment, which nobody writes.
    if (
        tensor.data_type not in TensorProto.DataType.values()
        or not tensor.data_type
        or tensor.HasField("segment")
    ):
        raise DataError(path, "is not an ONNX tensor", fix, code="Q206")
    try:
        return tensor.name, numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise DataError(
            path, f"is damaged ({error})", "copy or make it again", code="Q204"
        ) from error


def _list_files(folder: Path) -> list[Path]:
    paths = (path for path in folder.glob("input_*.pb") if _NUMBER.search(path.name))
    return sorted(paths, key=_make_sort_key)


# Files that are text whatever the configuration says; with a tokenizer all others are, too.
_TEXT = (".txt", ".text", ".md", ".rst")
# For messages: everything that `load_data` reads from a path.
_KINDS = (
    ".npz, .npy, .pb or Polygraphy .json files, folders of them, ONNX test_data_set_* folders, folders of images, "
    "script.py[:function], or text with a tokenizer"
)


@dataclass(frozen=True)
class _Opener:
    """Opens data for a model with these inputs.

    model: fills the caches of samples of text. tick: called for each sample that is read from a stream.
    """

    inputs: Inputs
    config: DataConfig
    model: ModelLike | None
    tick: Tick

    def open_source(self, source: Any) -> tuple[SampleSource, str]:
        """The samples of any kind of data, and their title."""
        if isinstance(source, (str, os.PathLike)):
            return self.open_text(str(source))
        # Before Iterable, which arrays of other libraries also are.
        named = isinstance(source, Mapping)
        if named or hasattr(source, "__array__"):
            arrays = name_arrays(source, self.inputs, "data")
            return divide_arrays(arrays, self.inputs, "data"), "arrays" if named else "array"
        if isinstance(source, (list, tuple)):
            feeds = {
                f"item {k}": name_arrays(item, self.inputs, f"item {k}")
                for k, item in enumerate(source)
            }
            return self.join_feeds(feeds), "samples"
        if isinstance(source, Iterable):
            return spool_samples(
                source, self.inputs, "data", self.config.samples, self.tick
            ), "stream"
        if callable(source):
            with guard_user_code(getattr(source, "__name__", "data")):
                result = source()
            return self.open_source(result)
        fix = "give a path, arrays by input name, or an iterable of {name: array}"
        raise DataError("data", f"is of type {type(source).__name__}", fix, code="Q206")

    def open_text(self, text: str) -> tuple[SampleSource, str]:
        """The samples of a path, a function in a script, or the word for generated texts."""
        # A file of this name goes first.
        if text == GENERATED and self.model is not None and not os.path.exists(text):
            texts = make_generated_samples(self.inputs, self.config, self.model)
            return spool_samples(texts, self.inputs, "text", None, self.tick), "text of its own"
        # The last colon: Windows paths have one of their own.
        script, colon, function = text.rpartition(":")
        if not (colon and script.endswith(".py")):
            script = text
            function = DEFAULT_FUNCTION
        if not script.endswith(".py"):
            return self.open_path(Path(text)), Path(text).name
        path = Path(script)
        title = f"{path.name}:{function}"
        result = call_function(path, function)
        if isinstance(result, Dataset):
            fix = "return arrays by input name or an iterable of {name: array}"
            raise DataError(title, "returns a Dataset", fix, code="Q213")
        # Such as a generator, which can be read only once.
        if isinstance(result, Iterable) and not isinstance(
            result, (str, os.PathLike, Mapping, list, tuple, np.ndarray)
        ):
            return spool_samples(result, self.inputs, title, self.config.samples, self.tick), title
        return self.open_source(result)[0], title

    def open_path(self, path: Path) -> SampleSource:
        """The samples of a file or folder.

        Raises DataError for a path that does not exist, is unreadable or of unknown kind, and inputs that hold no
        tensor.
        """
        for value in self.inputs:
            if not value.dtype:
                cause = (
                    "is a sequence, a map or an optional value, and files of samples hold tensors"
                )
                raise DataError(
                    f"input {value.name!r}",
                    cause,
                    "export the model with tensors for inputs",
                    code="Q206",
                )
        try:
            return self._open_folder(path) if os.path.isdir(path) else self._open_file(path)
        except OSError as error:
            raise DataError(
                path, explain_unreadable(error), "check its permissions", code="Q202"
            ) from error

    def join_feeds(self, feeds: Mapping[str, Arrays]) -> SampleSource:
        """Arrays for one run each, by their names in messages."""
        return join_sources(
            [divide_arrays(feed, self.inputs, where, feed=True) for where, feed in feeds.items()]
        )

    def _open_file(self, path: Path, *, several: bool = False) -> SampleSource:
        inputs = self.inputs
        if not os.path.exists(path):
            raise DataError(
                path, "there is no such file or folder", suggest_files(path), code="Q201"
            )
        if not os.path.isfile(path):
            check_input_kind(path, DataError)
        suffix = path.suffix.lower()
        if suffix == ".npz":
            return divide_arrays(load_npz(path), inputs, path.name, several=several)
        if suffix == ".npy":
            return self._open_npy(path, several=several)
        if suffix == ".pb":
            name, array = read_tensor(path)
            # Of one input there is no doubt, whatever the file calls it.
            alone = inputs[0].name if len(inputs) == 1 else name
            return divide_arrays({alone: array}, inputs, path.name, feed=True)
        if suffix == ".json":
            return self.join_feeds(
                {f"{path.name}, item {k}": feed for k, feed in enumerate(read_json_feeds(path))}
            )
        if suffix in SUFFIXES:
            return open_images([path], path.parent, inputs, self.config.images)
        if self.config.tokenizer or suffix in _TEXT:
            texts = make_text_samples(path, inputs, self.config, self.model)
            return spool_samples(texts, inputs, path.name, None, self.tick)
        raise DataError(
            path, "is of no kind that samples are read from", f"use {_KINDS}", code="Q206"
        )

    def _open_npy(self, path: Path, *, several: bool) -> SampleSource:
        if len(self.inputs) != 1:
            names = ", ".join(value.name for value in self.inputs)
            cause = f"holds one array, the model has {len(self.inputs)} inputs: {names}"
            raise DataError(path, cause, "use a .npz file", code="Q207")
        return divide_arrays(
            {self.inputs[0].name: load_npy(path)}, self.inputs, path.name, several=several
        )

    def _open_folder(self, folder: Path) -> SampleSource:
        sets = find_sets(folder)
        files = sorted(
            (p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")),
            key=_make_sort_key,
        )
        npz, npy, json = (
            [p for p in files if p.suffix.lower() == suffix] for suffix in (".npz", ".npy", ".json")
        )
        # One folder per input is a layout of its own; see `_open_input_folders`.
        by_input = {value.name: folder / _to_file_name(value.name) for value in self.inputs}
        images = find_images(folder)
        arrays = bool(sets or npz or npy)
        layouts = {}
        if sets:
            layouts["ONNX test data (input_*.pb)"] = lambda: read_lazily(
                sets, lambda path: read_set(path, self.inputs), lambda path: path.name
            )
        if npz:
            layouts[".npz files"] = lambda: self._join_files(npz)
        if npy:
            layouts[".npy files"] = lambda: self._open_npy_files(folder, npy)
        if all(path.is_dir() for path in by_input.values()):
            layouts["a folder for each input"] = lambda: self._open_input_folders(
                by_input, str(folder)
            )
        # Beside arrays they show what these are of, unless the configuration says how to read them.
        if images and (self.config.images is not None or not arrays):
            layouts["images"] = lambda: open_images(images, folder, self.inputs, self.config.images)
        if json and not (arrays or images):
            layouts["Polygraphy .json files"] = lambda: self._join_files(json)
        if not layouts:
            raise DataError(
                folder, "is empty: there are no samples in it", f"use {_KINDS}", code="Q203"
            )
        # Taking one of several kinds would leave the others out silently.
        if len(layouts) > 1:
            cause = f"holds {' and '.join(layouts)}"
            raise DataError(folder, cause, "keep one kind of samples in a folder", code="Q206")
        return next(iter(layouts.values()))()

    def _join_files(self, paths: Sequence[Path]) -> SampleSource:
        return join_sources([self._open_file(path, several=len(paths) > 1) for path in paths])

    def _open_npy_files(self, folder: Path, files: Sequence[Path]) -> SampleSource:
        """Open .npy files: one array per input if they are named after them, else all samples of the only input."""
        names = {_to_file_name(value.name): value.name for value in self.inputs}
        if names.keys() <= {path.stem for path in files}:
            arrays = {names.get(path.stem, path.stem): load_npy(path) for path in files}
            return divide_arrays(arrays, self.inputs, folder.name)
        if len(self.inputs) != 1:
            cause = (
                f"has no .npy file for each input ({', '.join(f'{stem}.npy' for stem in names)})"
            )
            fix = "name the files after the inputs, or use .npz files with one array per input"
            raise DataError(folder, cause, fix, code="Q207")
        return self._join_files(files)

    def _open_input_folders(self, by_input: dict[str, Path], where: str) -> SampleSource:
        """Open input_name/0001.npy …: the k-th files of all folders form one item."""
        files = {
            name: sorted(path.glob("*.npy"), key=_make_sort_key) for name, path in by_input.items()
        }
        counts = {name: len(paths) for name, paths in files.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            text = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
            cause = f"the inputs' folders do not hold the same number of .npy files: {text}"
            raise DataError(where, cause, code="Q212")
        sources = []
        for paths in zip(*files.values(), strict=True):
            arrays = {name: load_npy(path) for name, path in zip(files, paths, strict=True)}
            sources.append(divide_arrays(arrays, self.inputs, paths[0].name))
        return join_sources(sources)


def _to_file_name(name: str) -> str:
    """Convert an input's name to a file name: characters that a file system may refuse become "_"."""
    return re.sub(r"[^\w.-]", "_", name)


def _make_sort_key(path: Path) -> list[tuple[int, int, str]]:
    """Make a key that sorts 2.npy before 10.npy."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


# The word for texts that a language model writes itself, in the place of a path.
GENERATED = "self-generated"


def load_data(
    source: Any,
    inputs: Inputs,
    config: DataConfig | None = None,
    model: ModelLike | None = None,
    *,
    progress: Progress = silent,
) -> Dataset:
    """Load samples for a model with these inputs.

    source: a path (.npz, .npy, .pb, Polygraphy .json; a folder of these, of ONNX test data or of images; script.py or
    script.py:function; text, with config.tokenizer), "self-generated" for texts that a language model writes, a mapping
    {name: array of many samples}, one array, an iterable of {name: array} for one run each, a function returning any of
    these, a Dataset, or None for synthetic inputs.
    config.samples: at most so many. Of a source with more, a seeded choice; of a stream, the first.
    model: synthetic inputs are tried on it, to find sizes for its dynamic axes; it fills the caches of text.
    Raises DataError for samples that do not fit the model, if possible before any computation.
    """
    config = config or DataConfig()
    for value in () if model is None else model.graph.input:
        if (kind := value.type.WhichOneof("value")) in ("sequence_type", "map_type"):
            cause = f"is a {str(kind).removesuffix('_type')}, and samples hold tensors"
            fix = "export a model that takes tensors, and makes sequences of them itself"
            raise DataError(f"input {value.name!r}", cause, fix, code="Q206")
    if source is None:
        with progress("making up samples"):
            return make_synthetic(
                inputs, samples=config.samples or SAMPLES, seed=config.seed, model=model
            )
    if isinstance(source, Dataset):
        return _check_same_inputs(source, inputs)
    if not inputs:
        raise DataError(
            "data", "the model has no inputs to feed", "leave `data=…` out", code="Q208"
        )
    with progress("reading samples") as task:
        opened, title = _Opener(inputs, config, model, task.advance).open_source(source)
        return _choose_samples(opened, title, inputs, config)


def _choose_samples(
    source: SampleSource, title: str, inputs: Inputs, config: DataConfig
) -> Dataset:
    """Choose the requested samples. The first one is read now, so that errors show before work begins."""
    total = len(source)
    if total == 0:
        raise refuse_empty(title)
    chosen: Sequence[int] = range(total)
    spare: Sequence[int] | Unchosen = ()
    if config.samples is not None and config.samples < total:
        chosen = choose_items(np.random.default_rng(config.seed), chosen, config.samples)
        spare = Unchosen(total, chosen)
    first = source.read_sample(chosen[0])
    where = source.name_sample(chosen[0])
    notes = [check_dtype(np.asarray(first[value.name]).dtype, value, where) for value in inputs]
    last = source.read_sample(chosen[-1])
    if len(chosen) > 1 and all(np.array_equal(first[name], last[name]) for name in first):
        notes.append("the first and the last are the same: ranges need samples that differ")
    # Without repetitions: a source of many files has its own remarks on dtypes already.
    source = replace(source, notes=tuple(dict.fromkeys(filter(None, (*source.notes, *notes)))))
    dataset = Dataset(source, inputs, chosen, spare=spare, title=title)
    dataset[0]
    return dataset


def _check_same_inputs(dataset: Dataset, inputs: Inputs) -> Dataset:
    theirs, ours = ([value.name for value in some] for some in (dataset.inputs, inputs))
    if set(theirs) != set(ours):
        cause = f"was loaded for inputs {', '.join(theirs)}; the model has {', '.join(ours)}"
        raise DataError("data", cause, "load it with this model's inputs", code="Q208")
    return dataset
