"""Models whose large weights lie beside the graph, so that copies, edits, serialization and sessions stay cheap.

`strip_weights` makes a LightModel of a ModelProto: in its graph a large initializer is a stub (name, type and dims, and
the key of an array in the model's WeightStore). Models made from it share its arrays; an array is freed with the last
model or session that uses it. `attach_weights` writes the bytes back: every model that leaves onnxq goes through it.
Stubs are external data to every other tool, and those here leave external data alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto

from onnxq.arrays import Array, ArrayDict, Bytes
from onnxq.graph.scopes import embed_bytes, set_location
from onnxq.graph.skeleton import ONE_MESSAGE
from onnxq.graph.storage import (
    STUB_LOCATION,
    Spool,
    StoredArray,
    copy_fields,
    count_model_bytes,
    count_tensor_bytes,
    is_stub,
    walk_tensors,
)
from onnxq.sites import Names

# Bytes. Smaller tensors cost little to copy, and tools look at their values (axes, shapes, pads).
SMALLEST_STUB = 1 << 14
# Types whose arrays have the layout of raw_data in numpy and in ONNX Runtime.
SAME_LAYOUT = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.DOUBLE,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
        TensorProto.INT64,
    }
)

# Bytes of weights from which on those that are made leave memory, too, and no session gets all of them at once.
LARGE_BYTES = 1 << 30


@dataclass(eq=False, repr=False)
class WeightStore:
    """The arrays behind the stubs of one model.

    observed: facts about graphs with these weights or others, shared by all stores that come from one model.
    spool: takes the arrays of a model too large for memory; None where they stay in it.
    """

    observed: dict[Any, Any] = field(default_factory=dict)
    spool: Spool | None = None
    _arrays: dict[str, Array | StoredArray] = field(default_factory=dict)

    def put(self, tensor: TensorProto, array: Array | StoredArray) -> bool:
        """Make `tensor`, which has a type and dims but no values, a stub of `array`; False where it is too small.

        The array must not change from here on.
        """
        if array.nbytes < SMALLEST_STUB or tensor.data_type not in SAME_LAYOUT:
            return False
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array).view()
            # Of the view: the caller's own array stays writable.
            array.setflags(write=False)
            if self.spool is not None and self.spool.takes(array.nbytes):
                array = self.spool.write(array)
        self._refer_to(tensor, array)
        return True

    def _refer_to(self, tensor: TensorProto, array: Array | StoredArray) -> None:
        # The store keeps the array alive, so no other array in use has this id.
        key = str(id(array))
        self._arrays[key] = array
        set_location(tensor, location=STUB_LOCATION, offset=key)

    def array(self, tensor: TensorProto) -> Array:
        """The read-only values of a stub: those in a file only as long as the caller keeps them."""
        stored = self.locate(tensor)
        if not isinstance(stored, StoredArray):
            return stored
        values = stored.map()
        return values if tensor.data_type in SAME_LAYOUT else _unpack(tensor, values)

    def put_packed(self, tensor: TensorProto, packed: bytes) -> bool:
        """As `put`, for types that ONNX packs closer than numpy, given as they are packed; False without a spool."""
        if (
            self.spool is None
            or not self.spool.takes(len(packed))
            or tensor.data_type in SAME_LAYOUT
        ):
            return False
        self._refer_to(tensor, self.spool.write(np.frombuffer(packed, np.uint8)))
        return True

    def bytes_of(self, tensor: TensorProto) -> Bytes:
        """The values of a stub as they lie in a file: little endian, and packed where the type is."""
        stored = self.locate(tensor)
        array = stored.map() if isinstance(stored, StoredArray) else stored
        return array.astype(array.dtype.newbyteorder("<"), copy=False).ravel().view(np.uint8)

    def locate(self, tensor: TensorProto) -> Array | StoredArray:
        """The values of a stub in memory, or where they lie in a file: packed there where the type is."""
        return self._arrays[_key(tensor)]

    def adopt_arrays(self, other: WeightStore) -> None:
        """Keep the arrays of another store as well, for stubs that come over from its model."""
        self._arrays.update(other._arrays)

    def spool_large(self, size: int) -> None:
        """Take the arrays that come from now on to a file, where the model has so many bytes that memory may not do."""
        if size >= LARGE_BYTES:
            self.spool = Spool()

    def copy_for(self, proto: ModelProto) -> WeightStore:
        """A store of its own with the arrays that the stubs of `proto` stand for."""
        # Only the main graph has stubs: bodies hold small tensors.
        keys = (_key(tensor) for tensor in proto.graph.initializer if is_stub(tensor))
        # An array that no stub refers to any more is let go of here.
        arrays = {key: self._arrays[key] for key in keys}
        return WeightStore(self.observed, self.spool, arrays)


def _unpack(stub: TensorProto, packed: Bytes) -> Array:
    whole = TensorProto(data_type=stub.data_type, dims=stub.dims, raw_data=packed.tobytes())
    values = np.asarray(onnx.numpy_helper.to_array(whole))
    values.setflags(write=False)
    return values


def _key(stub: TensorProto) -> str:
    key: str = next(entry.value for entry in stub.external_data if entry.key == "offset")
    return key


@dataclass(frozen=True, eq=False)
class LightModel:
    """A model with stubs for its large initializers, and their arrays. It is not changed once others have seen it.

    libraries: paths of shared libraries with its custom operators. provider: execution provider of ONNX Runtime that it
    runs on, "" for the CPU. Models made from it have both too. facts: derived knowledge of this very model, by the
    name of the function that found it.
    """

    proto: ModelProto
    weights: WeightStore
    libraries: Names = ()
    provider: str = ""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def graph(self) -> GraphProto:
        """The main graph, with stubs."""
        return self.proto.graph

    @property
    def functions(self) -> Any:
        """The model-local functions."""
        return self.proto.functions

    @property
    def opset_import(self) -> Any:
        """The operator sets the model uses."""
        return self.proto.opset_import

    @property
    def metadata_props(self) -> Any:
        """The model's metadata."""
        return self.proto.metadata_props

    def replace(self, proto: ModelProto, store: WeightStore | None = None) -> LightModel:
        """The light model of a graph made from this one; itself for its own. store: has the arrays of new stubs too."""
        if proto is self.proto:
            return self
        return LightModel(
            proto, (store or self.weights).copy_for(proto), self.libraries, self.provider
        )


ModelLike = ModelProto | LightModel
M = TypeVar("M", bound=ModelLike)
P = ParamSpec("P")
V = TypeVar("V")


class KeepsWeights(Protocol[P]):
    """A change of the graph, for whole and light models alike."""

    def __call__(self, model: M, /, *args: P.args, **kwargs: P.kwargs) -> M:
        """The changed model, of the kind that was given."""


def keep_weights(change: Callable[Concatenate[ModelProto, P], ModelProto]) -> KeepsWeights[P]:
    """Let a function that changes a ModelProto, and reads no values of large tensors, take light models too."""

    @wraps(change)
    def changed(model: ModelLike, /, *args: P.args, **kwargs: P.kwargs) -> ModelLike:
        if isinstance(model, LightModel):
            return model.replace(change(model.proto, *args, **kwargs))
        return change(model, *args, **kwargs)

    return changed  # type: ignore[return-value]


def cache_on_model(find: Callable[[ModelLike], V]) -> Callable[[ModelLike], V]:
    """Let a function of a model that is changed no more look once at a light one."""

    @wraps(find)
    def recall(model: ModelLike) -> V:
        facts = model.facts if isinstance(model, LightModel) else {}
        if find.__name__ not in facts:
            facts[find.__name__] = find(model)
        known: V = facts[find.__name__]
        return known

    return recall


def bare_proto(model: ModelLike) -> ModelProto:
    """The ModelProto of a model, with stubs where it has some."""
    return model.proto if isinstance(model, LightModel) else model


def copy_proto(model: ModelLike) -> ModelProto:
    """A copy of the ModelProto of a model, with stubs where it has some."""
    copy = ModelProto()
    copy.CopyFrom(bare_proto(model))
    return copy


def store_of(model: ModelLike) -> WeightStore | None:
    """The arrays behind a model's stubs; None for a model that holds its own bytes."""
    return model.weights if isinstance(model, LightModel) else None


def list_libraries(model: object) -> Names:
    """Paths of the libraries with a model's custom operators; () where nobody has named any."""
    return model.libraries if isinstance(model, LightModel) else ()


def find_provider(model: object) -> str:
    """The execution provider that a model runs on; "" for the CPU."""
    return model.provider if isinstance(model, LightModel) else ""


def add_libraries(model: ModelLike, libraries: Names, provider: str = "") -> ModelLike:
    """The model with libraries of custom operators for its sessions, those of models made from it included.

    provider: execution provider that they run on; "" for that of the model.
    """
    if not libraries and not provider:
        return model
    whole = _lighten(model)
    known = whole.libraries + libraries
    return LightModel(whole.proto, whole.weights, known, provider or whole.provider)


def _lighten(model: ModelLike) -> LightModel:
    """A light model as it is; a ModelProto as one without stubs."""
    return model if isinstance(model, LightModel) else LightModel(model, WeightStore())


def rebuild(model: M, proto: ModelProto, store: WeightStore | None = None) -> M:
    """`proto`, made from `model`, as a model of the same kind. store: has the arrays of new stubs too."""
    return model.replace(proto, store) if isinstance(model, LightModel) else proto  # type: ignore[return-value]


def copy_store(model: ModelLike) -> WeightStore | None:
    """A copy of the model's store, to put the arrays of a change into; None where the model holds its own bytes."""
    return model.weights.copy_for(model.proto) if isinstance(model, LightModel) else None


def strip_weights(model: ModelLike) -> LightModel:
    """The model with stubs for its large initializers. The tensors of `model` stay as they are."""
    whole = _lighten(model)
    proto = whole.proto
    chosen = {k for k, tensor in enumerate(proto.graph.initializer) if _can_be_stub(tensor)}
    if not chosen:
        return whole
    light = ModelProto()
    store = whole.weights.copy_for(proto)
    # Field by field: the weights are never copied, not even for a moment.
    copy_fields(proto, light, ("graph",))
    copy_fields(proto.graph, light.graph, ("initializer",))
    for k, tensor in enumerate(proto.graph.initializer):
        target = light.graph.initializer.add()
        if k not in chosen:
            target.CopyFrom(tensor)
            continue
        copy_fields(tensor, target, ("raw_data",))
        # ONNX stores numbers in little-endian order.
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).newbyteorder("<")
        array = np.frombuffer(tensor.raw_data, kind).astype(kind.newbyteorder("="), copy=False)
        store.put(target, array.reshape(tensor.dims))
    return whole.replace(light, store)


def _can_be_stub(tensor: TensorProto) -> bool:
    # Values in float_data and its like would have to be decoded.
    plain = tensor.HasField("raw_data") and not tensor.HasField("data_location")
    return plain and tensor.data_type in SAME_LAYOUT and count_tensor_bytes(tensor) >= SMALLEST_STUB


def attach_weights(model: ModelLike) -> ModelProto:
    """The model with the bytes of its large initializers; a ModelProto, or a model without stubs, as it is."""
    proto = bare_proto(model)
    stubs = [tensor.name for tensor in proto.graph.initializer if is_stub(tensor)]
    return _attach(model, stubs) if isinstance(model, LightModel) and stubs else proto


def _attach(model: LightModel, names: Collection[str]) -> ModelProto:
    """A copy of the graph with the bytes of these initializers."""
    # Stubs weigh nothing: this copies the graph alone.
    whole = deepcopy(model.proto)
    wanted = set(names)
    for tensor in whole.graph.initializer:
        if tensor.name in wanted:
            embed_bytes(tensor, model.weights.bytes_of(tensor).tobytes())
    return whole


def refer_to_files(model: LightModel) -> tuple[ModelProto, ArrayDict]:
    """The model for an engine that reads arrays from files itself, and the arrays that lie in none, by name.

    Locations are relative to the root of the file system. Bytes of types that numpy does not pack are in the model.
    """
    arrays = {}
    packed = []
    places = {}
    for tensor in filter(is_stub, model.graph.initializer):
        place = model.weights.locate(tensor)
        if tensor.data_type not in SAME_LAYOUT:
            packed.append(tensor.name)
        elif (
            isinstance(place, StoredArray)
            and not place.offset % place.dtype.itemsize
            # Windows has a root for each drive, and no path from one to another.
            and os.name != "nt"
        ):
            places[tensor.name] = place
        else:
            arrays[tensor.name] = model.weights.array(tensor)
    proto = _attach(model, packed) if packed or places else model.proto
    for tensor in proto.graph.initializer:
        if (stored := places.get(tensor.name)) is not None:
            location = stored.file.path.relative_to(stored.file.path.anchor).as_posix()
            set_location(tensor, location=location, offset=stored.offset, length=stored.nbytes)
    return proto, arrays


@cache_on_model
def count_light_bytes(model: ModelLike) -> int:
    """The bytes of all tensors together, of those behind stubs too."""
    return sum(map(count_tensor_bytes, walk_tensors(bare_proto(model))))


def is_large_model(model: ModelLike) -> bool:
    """True for a model with more weights than go into memory several times."""
    return count_light_bytes(model) >= LARGE_BYTES


def measure_size(model: ModelLike) -> int:
    """About the bytes that the model takes in a file, its weights included."""
    proto = bare_proto(model)
    stubs = filter(is_stub, proto.graph.initializer)
    inside = count_model_bytes(proto)
    # protobuf counts by writing a message out, which it cannot beyond its limit.
    inside = proto.ByteSize() if inside < ONE_MESSAGE else inside
    return inside + sum(map(count_tensor_bytes, stubs))
