"""TensorRT and TensorRT-RTX in the child process: parse, build, and write down which kernels there are.

One code for both, for TensorRT 10 and 11: their Python modules have the same names. TensorRT for RTX builds ahead of
time for a named compute capability and lists its kernels in one verbose log message; TensorRT needs the GPU, and its
engine inspector gives the kernels as JSON.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from onnxq.backends.engine import ENGINE, LOG, MODEL, BuildResult, BuildState, Engine, Job, Profile
from onnxq.backends.trt.kernels import HEADER, INSPECTION, LAYERS
from onnxq.sites import drop_repeats

_ERRORS = ("ERROR", "INTERNAL_ERROR")


def build_engine(engine: Engine, job: Job, folder: Path) -> BuildResult:
    """Build the model in `folder`, and write the engine and the list of its kernels there."""
    try:
        library = import_module(engine.module)
    except ImportError as error:
        return BuildResult(state=BuildState.MISSING, reason=str(error))
    with open(folder / LOG, "w", encoding="utf-8") as sink:
        start = time.perf_counter()
        try:
            result = _build(library, make_logger(library, sink), engine, job, folder)
        # The library's own kinds have no common base; all of them end a build.
        except Exception as error:
            result = BuildResult(state=BuildState.FAILED, reason=f"{type(error).__name__}: {error}")
    return replace(result, seconds=time.perf_counter() - start)


def make_logger(library: Any, sink: IO[str]) -> Any:
    """A logger that keeps kernels and errors, and writes every line at once: those before a crash are there."""

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.layers = ""
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if message.startswith(HEADER):
                self.layers = message
            if severity.name in _ERRORS:
                self.errors.append(message.strip())
            sink.write(f"[{severity.name}] {message}\n")
            sink.flush()

    return Logger()


def _build(library: Any, logger: Any, engine: Engine, job: Job, folder: Path) -> BuildResult:
    try:
        builder = library.Builder(logger)
    except TypeError:  # pybind's word for a null pointer: TensorRT found no GPU or no driver
        reason = "; ".join(logger.errors[-1:]) or "it needs an NVIDIA GPU"
        return BuildResult(state=BuildState.UNABLE, reason=reason)
    if missing := load_plugins(library, logger, job.plugins):
        return BuildResult(state=BuildState.NO_PLUGIN, reason=missing)
    # Releases that know nothing but strong typing may drop its flag.
    typed = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(folder / MODEL)):
        return _read_refusal(parser)
    if job.debug_tensors:
        network.mark_unfused_tensors_as_debug_tensors()
    config = builder.create_builder_config()
    # Without it the list of kernels holds names only, or is not printed at all.
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    if not job.tf32:
        config.clear_flag(library.BuilderFlag.TF32)
    if engine.builds_ahead:
        known = library.ComputeCapability.__members__
        name = "SM" + "".join(map(str, job.capability)) if job.capability else "CURRENT"
        if name not in known:
            reason = f"this release builds for {_list_capabilities(known)}"
            return BuildResult(state=BuildState.NO_CAPABILITY, reason=reason)
        config.num_compute_capabilities = 1
        config.set_compute_capability(known[name], 0)
    _add_profile(builder, network, config, job.shapes)
    cache = _open_cache(config, job.cache) if job.cache and not engine.builds_ahead else None
    blob = builder.build_serialized_network(network, config)
    if blob is None:
        # The first error is the cause; later ones follow from it.
        reason = next(iter(logger.errors), "the builder gave no engine and no reason")
        return BuildResult(state=BuildState.FAILED, reason=reason)
    (folder / ENGINE).write_bytes(memoryview(blob))
    if cache is not None:
        Path(job.cache).write_bytes(memoryview(config.get_timing_cache().serialize()))
    inspection = "" if engine.builds_ahead else _inspect(library, logger, blob)
    (folder / (INSPECTION if inspection else LAYERS)).write_text(
        inspection or logger.layers, encoding="utf-8"
    )
    return BuildResult(state=BuildState.BUILT)


def load_plugins(library: Any, logger: Any, paths: Sequence[str]) -> str:
    """Register the plugins of shared libraries, after NVIDIA's own; returns why one of them gave none, "" for none.

    logger: of a kind that keeps `errors`.
    """
    with suppress(Exception):  # releases of RTX have no such plugins
        library.init_libnvinfer_plugins(logger, "")
    registry = library.get_plugin_registry()
    for path in paths:
        known = len(registry.all_creators)
        told = len(logger.errors)
        with suppress(Exception):
            registry.load_library(path)
        if len(registry.all_creators) == known:
            return f"{path}: {next(iter(logger.errors[told:]), 'it registers no plugin')}"
    return ""


def _read_refusal(parser: Any) -> BuildResult:
    """Why the parser did not take the model, and the node it stopped at."""
    errors = [parser.get_error(k) for k in range(parser.num_errors)]
    node = next((str(error.node_name()) for error in errors if error.node_name()), "")
    reason = "; ".join(drop_repeats(map(_describe_error, errors)))
    return BuildResult(
        state=BuildState.REFUSED, reason=reason or "the parser gave no reason", node=node
    )


def _describe_error(error: Any) -> str:
    text = str(error.desc()).strip()
    # Of an operator that it never takes, the parser prints the condition of its check.
    return f"it does not take the operator {error.node_operator()}" if text == "false" else text


def _list_capabilities(names: Sequence[str]) -> str:
    """SM75, SM120, … as "7.5, 12.0", ascending."""
    numbers = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"SM(\d+)", name)))
    return ", ".join(f"{number // 10}.{number % 10}" for number in numbers)


def _add_profile(builder: Any, network: Any, config: Any, shapes: Profile) -> None:
    inputs = [network.get_input(k) for k in range(network.num_inputs)]
    sized = [value for value in inputs if value.name in shapes]
    profile = builder.create_optimization_profile()
    for value in sized:
        sizes = [tuple(shape) for shape in shapes[value.name]]
        # Of an input that holds sizes the profile limits the values, of others the shape.
        (profile.set_shape_input if value.is_shape_tensor else profile.set_shape)(
            value.name, *sizes
        )
    if sized:
        config.add_optimization_profile(profile)


def _open_cache(config: Any, path: str) -> Any:
    saved = Path(path)
    cache = config.create_timing_cache(saved.read_bytes() if saved.exists() else b"")
    config.set_timing_cache(cache, True)  # a cache of another machine is used as far as it fits
    return cache


def _inspect(library: Any, logger: Any, blob: Any) -> str:
    """The inspector's JSON of the whole engine; "" when the engine cannot be loaded here."""
    engine = None
    with suppress(Exception):
        engine = library.Runtime(logger).deserialize_cuda_engine(blob)
    if engine is None:
        return ""
    return str(
        engine.create_engine_inspector().get_engine_information(library.LayerInformationFormat.JSON)
    )
