"""A model loaded in ONNX Runtime, fed and read by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from onnxq.errors import DataError, ModelError
from onnxq.files import ScratchFolder
from onnxq.graph import LightModel, ModelLike, ValueInfo, save_model
from onnxq.graph.light import refer_to_files
from onnxq.graph.scopes import collect_reads, walk_graphs
from onnxq.graph.storage.lazy import is_large_model
from onnxq.graph.weights import TENSOR_TYPES, count_model_bytes
from onnxq.nearest import suggest_names
from onnxq.runtime.engine import import_onnxruntime, list_faults, make_session_options
from onnxq.runtime.faults import explain_load_failure, explain_run_failure
from onnxq.runtime.libraries import register_libraries
from onnxq.runtime.providers import check_loaded, set_options

Feeds = Mapping[str, NDArray[Any]]

_ROOT = "/"
# protobuf stops at 2 GiB; models near it go through files.
_LARGE = 2**31 - 2**24
# `isbuiltin` of dtypes that a package adds to numpy: bfloat16, and most of 8 bits and fewer.
_FOREIGN = 2
# Of onnxruntime 1.23.2, the oldest that is supported: nobody has to ask for it.
_OLD_OPSET = 23
_PAIR = """<ir_version: 10, opset_import: ["" : {}]>
g (float[N] x) => (float[N] y) <float s = {{1}}, uint8 z = {{0}}> {{
    q = QuantizeLinear(x, s, z)
    y = DequantizeLinear(q, s, z) }}"""


class Session:
    """One model, ready to run.

    model: a model or a path. optimize: all of ORT's graph optimizations, or none (the file as it says).
    layout: False leaves out the last of them, which only change how tensors lie in memory.
    threads: 0 takes ORT's default, all cores. arena: False hands every buffer back as soon as it is free (lower peak
    memory, slower small runs). shapes_first: run Shape nodes as early as possible.
    save_optimized: where to write the graph ORT made. libraries: of custom operators, beside those of a light model.
    provider: to run on, "" for the CPU; None for a light model's own.
    Raises ModelError when ORT refuses the model, ConfigError for a provider that does not start on this machine,
    MissingDependencyError without onnxruntime.
    """

    def __init__(
        self,
        model: ModelLike | str | Path,
        *,
        optimize: bool = True,
        layout: bool = True,
        threads: int = 0,
        arena: bool = True,
        shapes_first: bool = False,
        save_optimized: Path | None = None,
        libraries: Sequence[str] = (),
        provider: str | None = None,
    ) -> None:
        ort = import_onnxruntime()
        options = make_session_options(
            optimize=optimize,
            layout=layout,
            threads=threads,
            arena=arena,
            shapes_first=shapes_first,
            prepack=not _is_large(model),
            save=save_optimized,
        )
        own = model.libraries if isinstance(model, LightModel) else ()
        register_libraries(options, (*own, *libraries))
        held = model.provider if isinstance(model, LightModel) else ""
        chosen = held if provider is None else provider
        # Kernels that add up in an order of their own would give other ranges in every run.
        options.use_deterministic_compute = bool(chosen)
        self._label = str(model) if isinstance(model, (str, Path)) else "the model"
        # Without optimizations ORT runs the model's own nodes.
        self._nodes = _name_nodes(model) if optimize and not isinstance(model, (str, Path)) else None
        try:
            # ORT reads these arrays as long as the session lives.
            ready, self._weights = _hand_over_weights(model, options)
            with _open_source(ready) as source:
                self._session = ort.InferenceSession(source, options, providers=[set_options(chosen)])
        except list_faults() as error:
            raise explain_load_failure(error, self._label, nodes=self._nodes) from error
        check_loaded(self._session, chosen)
        self.inputs: tuple[ValueInfo, ...] = tuple(_describe_value(arg) for arg in self._session.get_inputs())
        self.outputs: tuple[ValueInfo, ...] = tuple(_describe_value(arg) for arg in self._session.get_outputs())
        self._types = {arg.name: (arg.type, _parse_element_type(arg.type)) for arg in self._session.get_inputs()}

    @property
    def native(self) -> Any:
        """The onnxruntime.InferenceSession itself, for tools that ask one about its inputs and outputs."""
        return self._session

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """Run once; the outputs by name (all of them when `outputs` is None), sequences as lists.

        Raises DataError naming the input that does not fit, ModelError naming the node that failed.
        """
        names = [value.name for value in self.outputs] if outputs is None else list(outputs)
        ready: dict[str, Any] = {
            name: value if self._is_sequence(name) else np.asarray(value) for name, value in feeds.items()
        }
        self._check(ready)
        try:
            values = self._session.run(names, ready)
        except list_faults() as error:
            raise explain_run_failure(error, self._label, nodes=self._nodes) from error
        return dict(zip(names, values, strict=True))

    def _is_sequence(self, name: str) -> bool:
        """True for an input that takes a list of arrays."""
        return name in self._types and self._types[name][0].startswith("seq(")

    def _check(self, feeds: Feeds) -> None:
        """Name missing, unknown and wrongly typed inputs, which ORT reports without a name."""
        for name in feeds:
            if name not in self._types:
                near = suggest_names(name, self._types)
                raise DataError(f"input {name!r}", "the model has no such input", near, code="Q208")
        for name, (type_name, want) in self._types.items():
            if name not in feeds:
                raise DataError(f"input {name!r}", "was not given a value", suggest_names(name, feeds), code="Q207")
            value = feeds[name]
            # Text has several dtypes in numpy, and sequences and maps have none that could be compared.
            if not type_name.startswith("tensor(") or value.dtype.kind in "OUS":
                continue
            got = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            if want and got != want:
                cause = f"is {value.dtype}, the model wants {type_name.removeprefix('tensor(').removesuffix(')')}"
                raise DataError(f"input {name!r}", cause, "convert it first", code="Q210")
            if value.dtype.isbuiltin == _FOREIGN:
                cause = f"is {value.dtype}, which ONNX Runtime does not take from Python"
                fix = "let the model take float32 or int8, and cast it by its first node"
                raise DataError(f"input {name!r}", cause, fix, code="Q210")


def _hand_over_weights(model: ModelLike | str | Path, options: Any) -> tuple[ModelProto | str | Path, list[Any]]:
    """The model as a whole or with its stubs in ORT's hands; the returned values must live as long as the session."""
    if not isinstance(model, LightModel):
        return model, []
    proto, arrays = refer_to_files(model)
    # The folder that locations in a model without a path of its own are relative to.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _ROOT)
    # ORT drops initializers that nothing reads before it looks for these.
    read = collect_reads(model.graph)
    values = {
        name: import_onnxruntime().OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items() if name in read
    }
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    return proto, list(values.values())


@contextmanager
def _open_source(model: ModelProto | str | Path) -> Iterator[bytes | str]:
    """The model as ORT takes it: bytes, a path, or for models too large for protobuf a file that is removed again."""
    if isinstance(model, (str, Path)):
        if not os.path.isfile(model):
            raise ModelError(str(model), "there is no such file", code="Q101")
        yield str(model)
    elif count_model_bytes(model) < _LARGE:
        yield bytes(model.SerializeToString())
    else:
        with ScratchFolder() as folder:
            save_model(model, folder / "model.onnx", external=True)
            yield str(folder / "model.onnx")


@cache
def find_runnable_opset(opset: int) -> int:
    """This opset, or the next older one at which this ONNX Runtime has kernels for pairs; onnx may know newer ones."""
    for version in range(opset, _OLD_OPSET, -1):
        try:
            Session(onnx.parser.parse_model(_PAIR.format(version)), optimize=False, threads=1)
        except ModelError:
            continue
        return version
    return min(opset, _OLD_OPSET)


def _name_nodes(model: ModelLike) -> frozenset[str] | None:
    """The names of its nodes; None where some have none, and ORT may have named them."""
    names = frozenset(node.name for _, graph in walk_graphs(model.graph) for node in graph.node)
    return None if "" in names or model.functions else names


def _is_large(model: ModelLike | str | Path) -> bool:
    return isinstance(model, LightModel) and is_large_model(model)


def _parse_element_type(type_name: str) -> int:
    found = re.fullmatch(r"tensor\((\w+)\)", type_name)
    return TENSOR_TYPES.get(found[1], 0) if found else 0


def _describe_value(arg: Any) -> ValueInfo:
    element = _parse_element_type(arg.type)
    return ValueInfo(arg.name, element, tuple(arg.shape) if element else None)
