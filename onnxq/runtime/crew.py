"""Workers and the folder through which they get models and samples: as files, which each of them maps or reads."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxq.files import ScratchFolder
from onnxq.graph.light import SAME_LAYOUT, LightModel, ModelLike, WeightStore, strip_weights
from onnxq.graph.storage.stored import OpenFile, StoredArray
from onnxq.graph.weights import count_tensor_bytes, is_stub
from onnxq.workers import Piece, Workers
from onnxq.workers.base import R, T

Array = NDArray[Any]

# Bytes; weights begin at pages, so that each can be mapped alone.
_ALIGNMENT = 4096


@dataclass(frozen=True)
class SharedModel:
    """A model in a folder. digest: of its graph, its weights, and what it runs on."""

    folder: str
    digest: str


@dataclass(frozen=True)
class SharedFeeds:
    """One sample in a folder. names: of the inputs, in the order of its arrays."""

    folder: str
    digest: str
    names: tuple[str, ...]


class Crew:
    """Workers with a folder of their own, which is made with the first model or sample that is put into it.

    The arrays of all models lie in one file, each once: models of one run share most of their weights.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self.workers = Workers() if workers is None else workers
        self._scratch: ScratchFolder | None = None
        # Of each array in the file, by its digest.
        self._offsets: dict[str, int] = {}
        self._end = 0

    @property
    def plain(self) -> bool:
        """True where work in pieces gains nothing."""
        return self.workers.plain

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.close()
        if self._scratch is not None:
            self._scratch.remove()

    def map(
        self,
        function: Callable[[T], R],
        pieces: Sequence[Piece[T]],
        *,
        on_done: Callable[[Piece[T]], None] = lambda _: None,
    ) -> Iterator[R]:
        """Yield the result of every piece in order; see `Workers.map`."""
        return self.workers.map(function, pieces, on_done=on_done)

    def share_model(self, model: ModelLike) -> SharedModel:
        """Put a model into the folder. Raises OutputError where there is no room."""
        whole = _describe_model(model)
        for digest, array in whole.arrays.items():
            if digest not in self._offsets:
                self._append(array, digest)
        offsets = {digest: self._offsets[digest] for digest in whole.arrays}
        (self._folder() / f"{whole.digest}.graph").write_bytes(whole.graph)
        (self._folder() / f"{whole.digest}.json").write_text(json.dumps({**whole.hosts, "offsets": offsets}))
        return SharedModel(str(self._folder()), whole.digest)

    def share_feeds(self, feeds: Mapping[str, Array]) -> SharedFeeds:
        """Put one sample into the folder."""
        shared = SharedFeeds(str(self._folder()), hash_feeds(feeds), tuple(feeds))
        path = _name_feeds(shared)
        if not path.exists():
            # Text comes as objects, which numpy would pickle.
            arrays = [np.asarray(value, str) if value.dtype.kind == "O" else value for value in feeds.values()]
            with path.open("xb") as file:
                np.savez(file, *arrays)
        return shared

    def make_folder(self) -> Path:
        """A new folder within the crew's, which workers see too."""
        return Path(tempfile.mkdtemp(dir=self._folder()))

    def _folder(self) -> Path:
        if self._scratch is None:
            self._scratch = ScratchFolder()
        return self._scratch.path

    def _append(self, array: Array, digest: str) -> None:
        with (self._folder() / "weights").open("ab") as file:
            file.write(b"\0" * (-self._end % _ALIGNMENT))
            self._offsets[digest] = file.tell()
            file.write(_view_bytes(array))
            self._end = file.tell()


@dataclass(frozen=True, eq=False)
class _Description:
    """A model in parts. graph: its bytes, with digests in the place of weights. hosts: what it runs on."""

    graph: bytes
    arrays: dict[str, Array]
    hosts: dict[str, Any]

    @property
    def digest(self) -> str:
        return hash_parts(self.graph, json.dumps(self.hosts).encode())


def _describe_model(model: ModelLike) -> _Description:
    light, proto = strip_weights(model), ModelProto()
    proto.CopyFrom(light.proto)
    arrays: dict[str, Array] = {}
    for tensor in proto.graph.initializer:
        if is_stub(tensor):
            # As they lie in a file, since types of a few bits are packed there.
            array = light.weights.bytes_of(tensor)
            digest = hash_parts(_view_bytes(array))
            arrays[digest] = array
            next(entry for entry in tensor.external_data if entry.key == "offset").value = digest
    hosts = {"libraries": light.libraries, "provider": light.provider}
    return _Description(bytes(proto.SerializeToString(deterministic=True)), arrays, hosts)


def hash_model(model: ModelLike) -> str:
    """Hash a model as `Crew.share_model` does: its graph, its weights, and what it runs on."""
    return _describe_model(model).digest


def hash_parts(*parts: bytes | memoryview) -> str:
    """Hash some bytes in order, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_feeds(feeds: Mapping[str, Array]) -> str:
    """Hash the names, types, shapes and values of one sample."""
    parts: list[bytes | memoryview] = []
    for name, value in feeds.items():
        parts.append(f"{name} {value.dtype.str} {value.shape}".encode())
        parts.append(repr(value.tolist()).encode() if value.dtype.kind == "O" else _view_bytes(value))
    return hash_parts(*parts)


def _view_bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# A worker gets many pieces of one model, and at most two models in turn.
@lru_cache(maxsize=2)
def open_model(shared: SharedModel) -> LightModel:
    """The model, whose weights are mapped and not read."""
    folder = Path(shared.folder)
    about = json.loads((folder / f"{shared.digest}.json").read_text())
    proto = ModelProto.FromString((folder / f"{shared.digest}.graph").read_bytes())
    offsets: dict[str, int] = about["offsets"]
    file = OpenFile(folder / "weights", os.O_RDONLY) if offsets else None
    store = WeightStore()
    for tensor in proto.graph.initializer:
        if is_stub(tensor) and file is not None:
            offset = offsets[next(entry.value for entry in tensor.external_data if entry.key == "offset")]
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            if tensor.data_type in SAME_LAYOUT:
                kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
                store.put(tensor, StoredArray(file, offset, kind, tuple(tensor.dims)))
            else:
                packed = StoredArray(file, offset, np.dtype(np.uint8), (count_tensor_bytes(tensor),))
                tensor.raw_data = packed.map().tobytes()
    return LightModel(proto, store, tuple(about["libraries"]), about["provider"])


def read_feeds(shared: SharedFeeds) -> dict[str, Array]:
    """The sample as it was put."""
    with _name_feeds(shared).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays = [file[f"arr_{k}"] for k in range(len(shared.names))]
    texts = [array.astype(object) if array.dtype.kind == "U" else array for array in arrays]
    return dict(zip(shared.names, texts, strict=True))


def _name_feeds(shared: SharedFeeds) -> Path:
    return Path(shared.folder) / f"{shared.digest}.npz"
