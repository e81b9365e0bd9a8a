"""A model loaded in ONNX Runtime, fed and read by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.errors import DataError, ModelError
from onnxq.files import ScratchFolder
from onnxq.graph import LightModel, ModelLike, ValueInfo
from onnxq.graph.light import bare_proto
from onnxq.graph.scopes import collect_reads
from onnxq.graph.weights import count_model_bytes
from onnxq.nearest import suggest_names
from onnxq.runtime.engine import check_providers, import_onnxruntime, list_faults, make_session_options
from onnxq.runtime.faults import explain_load_failure, explain_run_failure
from onnxq.runtime.libraries import register_libraries

Feeds = Mapping[str, NDArray[Any]]

_DTYPES = {
    "float": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "double": onnx.TensorProto.DOUBLE,
    "int4": onnx.TensorProto.INT4,
    "uint4": onnx.TensorProto.UINT4,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int16": onnx.TensorProto.INT16,
    "uint16": onnx.TensorProto.UINT16,
    "int32": onnx.TensorProto.INT32,
    "uint32": onnx.TensorProto.UINT32,
    "int64": onnx.TensorProto.INT64,
    "uint64": onnx.TensorProto.UINT64,
    "bool": onnx.TensorProto.BOOL,
    "string": onnx.TensorProto.STRING,
}
# protobuf stops at 2 GiB; models near it go through files.
_LARGE = 2**31 - 2**24


class Session:
    """One model, ready to run.

    model: a model or a path. optimize: all of ORT's graph optimizations, or none (the file as it says).
    layout: False leaves out the last of them, which only change how tensors lie in memory.
    threads: 0 takes ORT's default, all cores. providers: None takes the CPU. arena: False hands every buffer back
    as soon as it is free (lower peak memory, slower small runs). shapes_first: run Shape nodes as early as possible.
    save_optimized: where to write the graph ORT made. profile: prefix of the profile that `end_profiling` finishes.
    Custom operators come from the libraries of the `use_libraries` blocks around the call.
    Raises ModelError when ORT refuses the model, ConfigError for a provider it lacks, MissingDependencyError
    without onnxruntime.
    """

    def __init__(
        self,
        model: ModelLike | str | Path,
        *,
        optimize: bool = True,
        layout: bool = True,
        threads: int = 0,
        providers: Sequence[str] | None = None,
        arena: bool = True,
        shapes_first: bool = False,
        save_optimized: Path | None = None,
        profile: Path | None = None,
    ) -> None:
        ort = import_onnxruntime()
        chosen = check_providers(providers)
        options = make_session_options(
            optimize=optimize,
            layout=layout,
            threads=threads,
            arena=arena,
            shapes_first=shapes_first,
            save=save_optimized,
            profile=profile,
        )
        register_libraries(options)
        self._label = str(model) if isinstance(model, (str, Path)) else "the model"
        try:
            # ORT reads these arrays as long as the session lives.
            self._weights = _hand_over_weights(model, options)
            with _Source(model) as source:
                self._session = ort.InferenceSession(source, options, providers=chosen)
        except list_faults() as error:
            raise explain_load_failure(error, self._label) from error
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
        ready: dict[str, Any] = {name: np.asarray(value) for name, value in feeds.items()}
        self._check(ready)
        try:
            values = self._session.run(names, ready)
        except list_faults() as error:
            raise explain_run_failure(error, self._label) from error
        return dict(zip(names, values, strict=True))

    def end_profiling(self) -> Path:
        """Stop profiling and return the file with its events."""
        return Path(self._session.end_profiling())

    def _check(self, feeds: Feeds) -> None:
        """Name missing, unknown and wrongly typed inputs, which ORT reports without a name."""
        for name in feeds:
            if name not in self._types:
                raise DataError(
                    f"input {name!r}", "the model has no such input", suggest_names(name, self._types), code="Q208"
                )
        for name, (type_name, want) in self._types.items():
            if name not in feeds:
                raise DataError(f"input {name!r}", "was not given a value", suggest_names(name, feeds), code="Q207")
            value = feeds[name]
            if value.dtype.kind in "OUS" or not type_name.startswith("tensor("):
                continue
            got = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            if want and got != want:
                wanted = type_name.removeprefix("tensor(").removesuffix(")")
                raise DataError(
                    f"input {name!r}", f"is {value.dtype}, the model wants {wanted}", "convert it first", code="Q210"
                )


def _hand_over_weights(model: ModelLike | str | Path, options: Any) -> list[Any]:
    """Give ORT the arrays behind stubs without a copy; the returned values must live as long as the session."""
    if not isinstance(model, LightModel):
        return []
    # ORT drops initializers that nothing reads before it looks for these.
    arrays, read = model.list_arrays(), collect_reads(model.graph)
    values = {
        name: import_onnxruntime().OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items() if name in read
    }
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    return list(values.values())


class _Source:
    """The model as ORT takes it: bytes, a path, or for models too large for protobuf a file that is removed again."""

    def __init__(self, model: ModelLike | str | Path) -> None:
        self.model = model
        self._folder: ScratchFolder | None = None

    def __enter__(self) -> bytes | str:
        if isinstance(self.model, (str, Path)):
            if not Path(self.model).is_file():
                raise ModelError(str(self.model), "there is no such file", code="Q101")
            return str(self.model)
        proto = bare_proto(self.model)
        if count_model_bytes(proto) < _LARGE:
            return bytes(proto.SerializeToString())
        from onnxq.graph import save_model

        self._folder = ScratchFolder()
        path = self._folder.path / "model.onnx"
        save_model(self.model, path, external=True)
        return str(path)

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.remove()


def _parse_element_type(type_name: str) -> int:
    found = re.fullmatch(r"tensor\((\w+)\)", type_name)
    return int(_DTYPES.get(found[1], 0)) if found else 0


def _describe_value(arg: Any) -> ValueInfo:
    element = _parse_element_type(arg.type)
    return ValueInfo(arg.name, element, tuple(arg.shape) if element else None)
