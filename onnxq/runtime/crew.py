"""Workers and the folder through which they get models and samples: as files, which each of them maps or reads."""

from __future__ import annotations

import json
import tempfile
import weakref
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnxq.arrays import Array, ArrayDict, Arrays, Shape, hash_parts, view_content
from onnxq.errors import ModelError
from onnxq.files import ScratchFolder
from onnxq.graph.light import SAME_LAYOUT, LightModel, ModelLike, WeightStore, strip_weights
from onnxq.graph.scopes import map_entries
from onnxq.graph.storage import OpenFile, Stamp, StoredArray, count_tensor_bytes, is_stub, open_data
from onnxq.runtime.session import import_onnxruntime
from onnxq.spec import QParams
from onnxq.workers import Workers, count_threads, read_value, register_packed, write_value

# Bytes; weights begin at pages, so that each can be mapped alone.
_ALIGNMENT = 4096

# Scales and zero points are what most pieces come to.
register_packed(QParams)

# By the identity of arrays, as long as they are there.
_digests: dict[int, tuple[weakref.ref[Any], str]] = {}


@dataclass(frozen=True)
class SharedArray:
    """An array in a file that workers open. stamp: of the file, see `OpenFile.stamp`."""

    path: str
    offset: int
    dtype: str
    shape: Shape
    stamp: Stamp = ()

    def open(self) -> StoredArray:
        """The array, to be mapped. Raises ModelError where its file is not there, or has been changed since."""
        return StoredArray(
            _open_file(self.path, self.stamp), self.offset, np.dtype(self.dtype), self.shape
        )


# An array that does not change, in memory or where it lies.
AnyArray = Array | StoredArray | SharedArray


@dataclass(frozen=True)
class SharedModel:
    """A model in a folder. digest: of its graph, its weights, and what it runs on."""

    # Left out of the text by which the journal knows a piece: another run has another folder.
    folder: str = field(repr=False)
    digest: str


@dataclass(frozen=True)
class SharedFeeds:
    """One sample in a folder."""

    folder: str = field(repr=False)
    digest: str


class Crew:
    """Workers with a folder of their own, which is made with the first model or sample that is put into it.

    Arrays stay in the files that they lie in. All others lie in one, each once: models of one run share most of their
    weights.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self.workers = Workers() if workers is None else workers
        # True where work in pieces gains nothing.
        self.plain = self.workers.plain
        # Yields the result of every piece in order.
        self.map = self.workers.map
        self._scratch: ScratchFolder | None = None
        # Of each array, by its digest.
        self._places: dict[str, SharedArray] = {}
        # Temporary ones among these would go with their last array.
        self._files: set[OpenFile] = set()
        self._end = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.close()
        if self._scratch is not None:
            self._scratch.remove()

    def share_model(self, model: ModelLike) -> SharedModel:
        """Put a model into the folder. Raises OutputError where there is no room."""
        whole = _describe_model(model)
        places = {digest: self._place(array, digest) for digest, array in whole.arrays.items()}
        rows = {digest: (place.path, place.offset, place.stamp) for digest, place in places.items()}
        folder = self._folder()
        (folder / f"{whole.digest}.graph").write_bytes(whole.graph)
        (folder / f"{whole.digest}.json").write_text(json.dumps({**whole.hosts, "places": rows}))
        return SharedModel(str(folder), whole.digest)

    def share_array(self, array: Array | StoredArray) -> AnyArray:
        """The array for the task of a piece: itself if it is small or does not leave this process, else its place."""
        if self.workers.count == 1 or array.nbytes < _ALIGNMENT:
            return array
        return self._place(array, "" if isinstance(array, StoredArray) else hash_array(array))

    def share_feeds(self, feeds: Arrays) -> SharedFeeds:
        """Put one sample into the folder."""
        shared = SharedFeeds(str(self._folder()), hash_feeds(feeds))
        path = _name_feeds(shared)
        if not path.exists():
            write_value(path, feeds)
        return shared

    def make_folder(self) -> Path:
        """A new folder within the crew's, which workers see too."""
        return Path(tempfile.mkdtemp(dir=self._folder()))

    def _folder(self) -> Path:
        if self._scratch is None:
            self._scratch = ScratchFolder()
        return self._scratch.path

    def _place(self, array: Array | StoredArray, digest: str) -> SharedArray:
        """Where an array lies. digest: of one in memory, which is written to the folder's file unless it is there."""
        if isinstance(array, StoredArray):
            self._files.add(array.file)
            return SharedArray(
                str(array.file.path), array.offset, array.dtype.name, array.shape, array.file.stamp
            )
        if digest not in self._places:
            path = self._folder() / "weights"
            with path.open("ab") as file:
                file.write(b"\0" * (-self._end % _ALIGNMENT))
                self._places[digest] = SharedArray(str(path), file.tell(), "uint8", (array.nbytes,))
                file.write(view_content(array))
                self._end = file.tell()
        return replace(self._places[digest], dtype=array.dtype.name, shape=array.shape)


@dataclass(frozen=True, eq=False)
class _Description:
    """A model in parts. graph: its bytes, with digests in the place of weights. hosts: what it runs on."""

    graph: bytes
    arrays: dict[str, Array | StoredArray]
    hosts: dict[str, Any]

    @property
    def digest(self) -> str:
        return hash_parts(self.graph, json.dumps(self.hosts))


def _describe_model(model: ModelLike) -> _Description:
    light = strip_weights(model)
    proto = ModelProto()
    proto.CopyFrom(light.proto)
    arrays = {}
    for tensor in proto.graph.initializer:
        if is_stub(tensor):
            array = light.weights.locate(tensor)
            # By its values, wherever they lie: equal models have one digest.
            digest = hash_array(array)
            arrays[digest] = array
            next(entry for entry in tensor.external_data if entry.key == "offset").value = digest
    hosts = {"libraries": light.libraries, "provider": light.provider}
    return _Description(bytes(proto.SerializeToString(deterministic=True)), arrays, hosts)


def hash_model(model: ModelLike) -> str:
    """Hash a model as `Crew.share_model` does: its graph, its weights, and what it runs on."""
    return _describe_model(model).digest


def hash_run(kind: str, *parts: str) -> str:
    """Hash what a piece depends on that runs a model: these texts, the versions of all that computes, the threads."""
    host = (version("onnxq"), import_onnxruntime().__version__, str(count_threads()))
    return hash_parts(kind, *host, *parts)


def hash_array(array: Array | StoredArray) -> str:
    """Hash the bytes of an array that does not change; of each only once."""
    key = id(array)
    known = _digests.get(key)
    if known is None:
        values = array.map() if isinstance(array, StoredArray) else array
        # Another array may have its identity later.
        alive = weakref.ref(array, lambda _: _digests.pop(key, None))
        known = _digests[key] = alive, hash_parts(view_content(values))
    return known[1]


def hash_feeds(feeds: Arrays) -> str:
    """Hash the names, types, shapes and values of one sample."""
    parts: list[str | bytes | memoryview] = []
    for name, value in feeds.items():
        parts += (f"{name} {value.dtype.str} {value.shape}", view_content(value))
    return hash_parts(*parts)


# A worker gets many pieces of one model, and at most two models in turn.
@lru_cache(maxsize=2)
def open_model(shared: SharedModel) -> LightModel:
    """The model, whose weights are mapped and not read."""
    folder = Path(shared.folder)
    about = json.loads((folder / f"{shared.digest}.json").read_text())
    proto = ModelProto.FromString((folder / f"{shared.digest}.graph").read_bytes())
    store = WeightStore()
    for tensor in proto.graph.initializer:
        if is_stub(tensor):
            path, offset, stamp = about["places"][map_entries(tensor.external_data)["offset"]]
            file = _open_file(path, tuple(stamp))
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            if tensor.data_type in SAME_LAYOUT:
                kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
                store.put(tensor, StoredArray(file, offset, kind, tuple(tensor.dims)))
            else:
                # Types that numpy does not pack stand in the graph, as bytes.
                size = count_tensor_bytes(tensor)
                packed = StoredArray(file, offset, np.dtype(np.uint8), (size,))
                tensor.raw_data = packed.map().tobytes()
    return LightModel(proto, store, tuple(about["libraries"]), about["provider"])


def open_array(array: AnyArray) -> Array:
    """The values of an array as `Crew.share_array` gives it."""
    array = array.open() if isinstance(array, SharedArray) else array
    return array.map() if isinstance(array, StoredArray) else array


# A model has one or two files of weights, or one for each of them.
@lru_cache(maxsize=8)
def _open_file(path: str, stamp: Stamp) -> OpenFile:
    file = open_data(Path(path))
    if stamp and file.stamp != stamp:
        raise ModelError(
            path,
            "was changed while the run read it",
            "start again with the file at rest",
            code="Q106",
        )
    return file


def read_feeds(shared: SharedFeeds) -> ArrayDict:
    """The sample as it was put."""
    feeds: ArrayDict = read_value(_name_feeds(shared))
    return feeds


def _name_feeds(shared: SharedFeeds) -> Path:
    return Path(shared.folder) / f"{shared.digest}.npz"
