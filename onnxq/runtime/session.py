"""A model loaded in ONNX Runtime, imported at first use: fed and read by name, with its provider and operators."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from onnxq.arrays import ArrayDict, Arrays
from onnxq.errors import ConfigError, DataError, MissingDependencyError, ModelError, suggest_names
from onnxq.files import AnyPath, ScratchFolder
from onnxq.graph import LightModel, ModelLike, ValueInfo, attach_weights, fix_noise, save_model
from onnxq.graph.light import find_provider, is_large_model, list_libraries, refer_to_files
from onnxq.graph.scopes import collect_reads, walk_nodes
from onnxq.graph.skeleton import ONE_MESSAGE
from onnxq.graph.storage import TENSOR_TYPES, count_model_bytes, load_external
from onnxq.runtime.faults import clean_message, explain_load_failure, explain_run_failure
from onnxq.sites import EngineOptions, Names, NameSet, drop_repeats
from onnxq.workers import count_threads

# Only FATAL reaches stderr: lesser errors ORT also raises, and we translate those.
_QUIET = 4


def import_onnxruntime() -> Any:
    """The module onnxruntime. Raises MissingDependencyError with the install line when it is missing or damaged."""
    try:
        import onnxruntime
    except ImportError as error:
        raise _explain_missing(f"cannot be imported ({error})") from error
    # Uninstalling one of onnxruntime and onnxruntime-gpu beside the other leaves a folder without a module in it.
    if not hasattr(onnxruntime, "InferenceSession"):
        raise _explain_missing("is damaged: several of its packages were installed over each other")
    return onnxruntime


def _explain_missing(cause: str) -> MissingDependencyError:
    return MissingDependencyError(
        "onnxruntime",
        cause,
        'pip install "onnxq[cpu]"  (with an NVIDIA GPU: "onnxq[gpu]"; never both)',
        code="Q801",
    )


@lru_cache(maxsize=1)
def list_faults() -> tuple[type[Exception], ...]:
    """Everything ORT raises when it cannot load or run a model."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    # Fail, InvalidGraph and the like have no base of their own.
    own = [
        kind
        for kind in vars(state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    return (*own, ValueError, RuntimeError, TypeError, MemoryError)


def make_session_options(
    *,
    optimize: bool,
    threads: int,
    layout: bool = True,
    fuse_pairs: bool = True,
    arena: bool = True,
    shapes_first: bool = False,
    prepack: bool = True,
    save: Path | None = None,
) -> Any:
    """Quiet options. Spinning is off: idle threads of one session must not slow down the next one measured."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    level = ort.GraphOptimizationLevel
    highest = level.ORT_ENABLE_ALL if layout else level.ORT_ENABLE_EXTENDED
    options.graph_optimization_level = highest if optimize else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = count_threads(threads)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not fuse_pairs:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not arena:
        # Buffers go back to the system as soon as they are free: the peak is of live tensors only.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    if shapes_first:
        # Shape nodes run as soon as they can; in the default order they may run last and keep every tensor alive.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if save is not None:
        options.optimized_model_filepath = str(save)
    return options


def check_libraries(paths: Iterable[AnyPath]) -> Names:
    """Absolute paths of shared libraries of custom operators, each once, for `add_libraries` and `Session`.

    Raises ConfigError for a file that is missing or that ONNX Runtime cannot register, and MissingDependencyError
    without onnxruntime. No paths: nothing is loaded.
    """
    # dlopen looks for a bare file name in the system's folders, not in the working directory.
    absolute = drop_repeats(str(Path(path).resolve()) for path in paths)
    if absolute:
        register_libraries(import_onnxruntime().SessionOptions(), absolute)
    return absolute


def register_libraries(options: Any, paths: Iterable[str]) -> None:
    """Add libraries to an onnxruntime.SessionOptions, as `check_libraries` does."""
    # ORT refuses a domain that is registered twice with the same options.
    for path in dict.fromkeys(paths):
        subject = f"operator library {path}"
        if not os.path.isfile(path):
            fix = "give the path of a shared library (.so, .dylib, .dll)"
            raise ConfigError(subject, "there is no such file", fix, code="Q322")
        try:
            options.register_custom_ops_library(path)
        except list_faults() as error:
            cause = f"ONNX Runtime cannot load it: {clean_message(error)}"
            fix = "give a shared library for this machine that exports RegisterCustomOps"
            raise ConfigError(subject, cause, fix, code="Q322") from error


_SUFFIX = "ExecutionProvider"
CPU = f"CPU{_SUFFIX}"
_CUDA = f"CUDA{_SUFFIX}"
# Options with which a provider computes float32 in float32: ranges and checks must not depend on where they were made.
_EXACT: Mapping[str, Mapping[str, str]] = {
    _CUDA: {"use_tf32": "0"},
    f"OpenVINO{_SUFFIX}": {"precision": "FP32"},
}


def check_provider(name: str) -> str:
    """The full name of an installed provider: "cuda" -> "CUDAExecutionProvider"; "" for the CPU, which needs none.

    Raises ConfigError, with the installed ones, for any other name, MissingDependencyError without onnxruntime.
    """
    short = _shorten_name(name)
    if short == _shorten_name(CPU):
        return ""
    known: dict[str, str] = {
        _shorten_name(full): full for full in import_onnxruntime().get_available_providers()
    }
    if short not in known:
        cause = "this onnxruntime does not have it"
        raise ConfigError(
            f"provider {name!r}", cause, f"installed: {', '.join(sorted(known))}", code="Q312"
        )
    return known[short]


def _shorten_name(name: str) -> str:
    return name.lower().removesuffix(_SUFFIX.lower()).replace("_", "").replace("-", "")


def set_options(provider: str) -> tuple[str, dict[str, str]]:
    """A provider with its options, as sessions take it. Named, because ORT would otherwise take any GPU it finds."""
    if provider == _CUDA:
        _load_cuda()
    return provider or CPU, dict(_EXACT.get(provider, {}))


@cache
def _load_cuda() -> None:
    """Load CUDA and cuDNN of NVIDIA's packages, which the system's loader does not look for."""
    with redirect_stdout(StringIO()):  # says what is not there: `check_loaded` tells
        import_onnxruntime().preload_dlls()


def check_loaded(session: Any, provider: str) -> None:
    """ConfigError where ONNX Runtime printed a line and took the CPU: the provider is installed and does not load."""
    if provider and provider not in session.get_providers():
        cause = "is installed, but does not start on this machine: ONNX Runtime took the CPU in its place"
        own = ' (pip install "onnxruntime-gpu[cuda,cudnn]")' if provider == _CUDA else ""
        fix = f"see that its driver and its libraries are there{own}"
        raise ConfigError(f"provider {_shorten_name(provider)!r}", cause, fix, code="Q323")


Feeds = Arrays
AnyModel = ModelLike | AnyPath

_ROOT = "/"
# `isbuiltin` of dtypes that a package adds to numpy: bfloat16, and most of 8 bits and fewer.
_FOREIGN = 2
_FLOAT8 = {kind for name, kind in TENSOR_TYPES.items() if name.startswith("float8")}
# Of onnxruntime 1.23.2, the oldest that is supported: nobody has to ask for it.
_OLD_OPSET = 23
_PAIR = """<ir_version: 10, opset_import: ["" : {}]>
g (float[N] x) => (float[N] y) <float s = {{1}}, uint8 z = {{0}}> {{
    q = QuantizeLinear(x, s, z)
    y = DequantizeLinear(q, s, z) }}"""


class Session:
    """One model, ready to run.

    model: a model or a path. optimize: all of ORT's graph optimizations, or none (the file as it says).
    layout: False leaves out the last of them, which only change how tensors lie in memory. fuse_pairs: False computes
    everything between pairs in floats, as the file says, and optimizes no model of 8-bit floats.
    threads: 0 takes ORT's default, all cores. arena: False hands every buffer back as soon as it is free (lower peak
    memory, slower small runs). shapes_first: run Shape nodes as early as possible.
    save_optimized: where to write the graph ORT made. libraries: of custom operators, beside those of a light model.
    provider: to run on, "" for the CPU; None for a light model's own.
    Raises ModelError when ORT refuses the model, ConfigError for a provider that does not start on this machine,
    MissingDependencyError without onnxruntime.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        optimize: bool = True,
        layout: bool = True,
        fuse_pairs: bool = True,
        threads: int = 0,
        arena: bool = True,
        shapes_first: bool = False,
        save_optimized: Path | None = None,
        libraries: Sequence[str] = (),
        provider: str | None = None,
    ) -> None:
        ort = import_onnxruntime()
        options = make_session_options(
            optimize=optimize and (fuse_pairs or not _holds_float8(model)),
            layout=layout,
            fuse_pairs=fuse_pairs,
            threads=threads,
            arena=arena,
            shapes_first=shapes_first,
            prepack=not (isinstance(model, LightModel) and is_large_model(model)),
            save=save_optimized,
        )
        register_libraries(options, (*list_libraries(model), *libraries))
        if provider is None:
            provider = find_provider(model)
        # Kernels that add up in an order of their own would give other ranges in every run.
        options.use_deterministic_compute = bool(provider)
        self._label = "the model"
        self._nodes = None
        if isinstance(model, (str, Path)):
            self._label = str(model)
        elif optimize:
            # Without optimizations ORT runs the model's own nodes.
            self._nodes = _name_nodes(model)
        try:
            # ORT reads these arrays as long as the session lives.
            ready, self._weights = _hand_over_weights(model, options)
            with _open_source(ready) as source:
                self._session = ort.InferenceSession(
                    source, options, providers=[set_options(provider)]
                )
        except list_faults() as error:
            raise explain_load_failure(error, self._label, nodes=self._nodes) from error
        check_loaded(self._session, provider)
        self.inputs = tuple(map(_describe_value, self._session.get_inputs()))
        self.outputs = tuple(map(_describe_value, self._session.get_outputs()))
        self._types = {arg.name: str(arg.type) for arg in self._session.get_inputs()}

    @property
    def native(self) -> Any:
        """The onnxruntime.InferenceSession itself, for tools that ask one about its inputs and outputs."""
        return self._session

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> ArrayDict:
        """Run once; the outputs by name (all of them when `outputs` is None), sequences as lists.

        Raises DataError naming the input that does not fit, ModelError naming the node that failed.
        """
        names = [value.name for value in self.outputs] if outputs is None else list(outputs)
        sequences = {name for name, kind in self._types.items() if kind.startswith("seq(")}
        ready = {
            name: value if name in sequences else np.asarray(value) for name, value in feeds.items()
        }
        self._check(ready)
        try:
            values = self._session.run(names, ready)
        except list_faults() as error:
            raise explain_run_failure(error, self._label, nodes=self._nodes) from error
        # ONNX Runtime 1.23, the newest for Python 3.10, frees the memory of outputs that are inputs.
        return {name: ready.get(name, value) for name, value in zip(names, values, strict=True)}

    def _check(self, feeds: Feeds) -> None:
        """Name missing, unknown and wrongly typed inputs, which ORT reports without a name."""
        for name in feeds:
            if name not in self._types:
                near = suggest_names(name, self._types)
                raise DataError(f"input {name!r}", "the model has no such input", near, code="Q208")
        for name, type_name in self._types.items():
            subject = f"input {name!r}"
            if name not in feeds:
                near = suggest_names(name, feeds)
                raise DataError(subject, "was not given a value", near, code="Q207")
            value = feeds[name]
            # Text has several dtypes in numpy, and sequences and maps have none that could be compared.
            if not type_name.startswith("tensor(") or value.dtype.kind in "OUS":
                continue
            want = read_element_type(type_name)
            if want not in (0, onnx.helper.np_dtype_to_tensor_dtype(value.dtype)):
                cause = f"is {value.dtype}, the model wants {type_name.removeprefix('tensor(').removesuffix(')')}"
                raise DataError(subject, cause, "convert it first", code="Q210")
            if value.dtype.isbuiltin == _FOREIGN:
                cause = f"is {value.dtype}, which ONNX Runtime does not take from Python"
                fix = "let the model take float32 or int8, and cast it by its first node"
                raise DataError(subject, cause, fix, code="Q210")


def _holds_float8(model: AnyModel) -> bool:
    """True for a model of 8-bit floats, in which ONNX Runtime (1.32) drops a Relu in front of a QuantizeLinear.

    It takes the zero point for the lowest integer, at which values saturate.
    """
    if isinstance(model, (str, Path)):
        return False
    return any(tensor.data_type in _FLOAT8 for tensor in model.graph.initializer)


def _hand_over_weights(model: AnyModel, options: Any) -> tuple[AnyModel, list[Any]]:
    """The model as a whole or with its stubs in ORT's hands; the returned values must live as long as the session."""
    if isinstance(model, (str, Path)):
        return model, []
    model = fix_noise(model)
    if not isinstance(model, LightModel):
        return model, []
    proto, arrays = refer_to_files(model)
    if count_model_bytes(proto) >= ONE_MESSAGE:
        # Of types that numpy does not pack: all of it goes through a file.
        return model, []
    # The folder that locations in a model without a path of its own are relative to.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _ROOT)
    # ORT drops initializers that nothing reads before it looks for these.
    read = collect_reads(model.graph)
    names = [name for name in arrays if name in read]
    values = [import_onnxruntime().OrtValue.ortvalue_from_numpy(arrays[name]) for name in names]
    if values:
        options.add_external_initializers(names, values)
    return proto, values


@contextmanager
def _open_source(model: AnyModel) -> Iterator[bytes | str]:
    """The model as ORT takes it: bytes, a path, or for models too large for protobuf a file that is removed again."""
    if isinstance(model, (str, Path)):
        if not os.path.isfile(model):
            raise ModelError(str(model), "there is no such file", code="Q101")
        yield str(model)
    elif isinstance(model, ModelProto) and count_model_bytes(model) < ONE_MESSAGE:
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


def _name_nodes(model: ModelLike) -> NameSet | None:
    """The names of its nodes; None where some have none, and ORT may have named them."""
    names = frozenset(node.name for node in walk_nodes(model.graph))
    return None if "" in names or model.functions else names


def read_element_type(type_name: str) -> int:
    """The ONNX type of "tensor(float)"; 0 for sequences, optionals and types of ONNX Runtime alone."""
    match = re.fullmatch(r"tensor\((\w+)\)", type_name)
    return TENSOR_TYPES.get(match[1], 0) if match else 0


def _describe_value(arg: Any) -> ValueInfo:
    element = read_element_type(arg.type)
    return ValueInfo(arg.name, element, tuple(arg.shape) if element else None)


def optimize_graph(
    model: AnyModel, *, layout: bool = True, fuse_pairs: bool = True, libraries: Sequence[str] = ()
) -> onnx.ModelProto:
    """The graph ORT runs at its highest optimization level on this CPU: fused and integer kernels by op type.

    layout: False stops before tensors are laid out anew (NCHWc, NHWC): the same fusions, and every tensor that
    survives them still has its own name and axes. libraries: as of `Session`.
    For looking at, not for shipping: it is bound to the machine. Raises ModelError when ORT refuses the model.
    """
    with ScratchFolder() as folder:
        path = folder / "optimized.onnx"
        if not isinstance(model, (str, Path)):
            # Stubs would come back in the file, and nobody could read them.
            model, libraries = attach_weights(model), (*list_libraries(model), *libraries)
            if count_model_bytes(model) >= ONE_MESSAGE:
                save_model(model, folder / "model.onnx", external=True)
                model = folder / "model.onnx"
        Session(
            model,
            layout=layout,
            fuse_pairs=fuse_pairs,
            threads=1,
            save_optimized=path,
            libraries=libraries,
            provider="",
        )
        optimized = onnx.load(path, load_external_data=False)
        if isinstance(model, (str, Path)):
            # Weights that stayed as they were are still where the model's file has them.
            load_external(optimized, Path(model))
        return optimized


# Of ONNX Runtime's log: warnings and what is worse.
_WARNING = 2


def find_plugin_device(provider: str, library: str) -> Any:
    """The first device of a provider, whose library is registered; once a process. Raises errors of ONNX Runtime."""
    import onnxruntime

    onnxruntime.register_execution_provider_library(provider, library)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
    if not devices:
        raise RuntimeError("its library offers no device")
    return devices[0]


def open_plugin_session(
    device: Any, model: Path, settings: EngineOptions, entries: EngineOptions | None = None
) -> Any:
    """A session of ONNX Runtime on a device of a plugin, and on the CPU for nodes that it does not take.

    settings: of the provider. entries: of the session. A run that fails is not repeated on the CPU. Raises errors of
    ONNX Runtime, which have no common kind.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _WARNING
    for name, value in (entries or {}).items():
        options.add_session_config_entry(name, value)
    options.add_provider_for_devices([device], dict(settings))
    session = onnxruntime.InferenceSession(str(model), options)
    session.disable_fallback()
    return session
