"""TensorRT and TensorRT-RTX, in the child process: parse, build, and write down which kernels there are.

One code for both, for TensorRT 10 and 11: their Python modules have the same names. TensorRT for RTX builds ahead of
time for a named compute capability and lists its kernels in one verbose log message; TensorRT needs the GPU, and its
engine inspector tells the kernels as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from onnxq.engines.build.process import ENGINE, LAYERS, LOG, MODEL
from onnxq.engines.prove.trt_kernels import HEADER
from onnxq.engines.prove.proof import BUILT, FAILED, REFUSED

_ERRORS = ("ERROR", "INTERNAL_ERROR")


def build(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Build the model in `folder` with the library that the job names; the result as JSON holds it."""
    try:
        library = import_module(job["library"])
    except ImportError as error:
        return {"state": "missing", "reason": str(error)}
    with open(folder / LOG, "w", encoding="utf-8") as sink:
        logger = _logger(library, sink)
        start = time.perf_counter()
        try:
            told = _build(library, logger, job, folder)
        except Exception as error:  # the library's own kinds have no common base; all of them end a build
            told = {"state": FAILED, "reason": f"{type(error).__name__}: {error}"}
        kind = "TensorRT for RTX" if job["library"] == "tensorrt_rtx" else "TensorRT"
        told |= {"version": f"{kind} {library.__version__}", "seconds": time.perf_counter() - start}
        return {**told, "errors": logger.errors[-8:]}


def _logger(library: Any, sink: IO[str]) -> Any:
    """A logger that writes every line at once, so that the lines before a crash are there, and keeps what matters."""

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.layers = ""
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if message.startswith(HEADER):
                self.layers = message
            if severity.name in _ERRORS:
                self.errors.append(message)
            sink.write(f"[{severity.name}] {message}\n")
            sink.flush()

    return Logger()


def _build(library: Any, logger: Any, job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    rtx = job["library"] == "tensorrt_rtx"
    try:
        builder = library.Builder(logger)
    except TypeError:  # pybind's word for a null pointer: TensorRT found no GPU or no driver
        return {"state": "unable", "reason": "; ".join(logger.errors[-1:]) or "it needs an NVIDIA GPU"}
    typed = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(folder / MODEL)):
        return _refusal(parser)
    config = builder.create_builder_config()
    # Without it the list of kernels holds names only, or is not printed at all.
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    if job["capability"]:
        known = {name: value for name, value in vars(library.ComputeCapability).items() if name.startswith("SM")}
        if job["capability"] not in known:
            able = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in sorted(known, key=lambda name: int(name[2:])))
            return {"state": "usage", "reason": f"this release builds for {able}"}
        config.num_compute_capabilities = 1
        config.set_compute_capability(known[job["capability"]], 0)
    _add_profile(builder, network, config, job["shapes"])
    cache = None if rtx else _open_cache(config, job["cache"])
    blob = builder.build_serialized_network(network, config)
    if blob is None:
        return {"state": FAILED, "reason": _first(logger.errors) or "the builder gave no engine and no reason"}
    (folder / ENGINE).write_bytes(memoryview(blob))
    if cache is not None:
        Path(job["cache"]).write_bytes(memoryview(config.get_timing_cache().serialize()))
    layers = logger.layers if rtx else _inspect(library, logger, blob) or logger.layers
    (folder / LAYERS).write_text(layers, encoding="utf-8")
    return {"state": BUILT}


def _refusal(parser: Any) -> dict[str, Any]:
    """What the parser did not take, and the node it stopped at."""
    errors = [parser.get_error(k) for k in range(parser.num_errors)]
    node = next((str(error.node_name()) for error in errors if error.node_name()), "")
    told = "; ".join(dict.fromkeys(str(error.desc()).strip() for error in errors))
    return {"state": REFUSED, "reason": told or "the parser gave no reason", "node": node}


def _first(errors: list[str]) -> str:
    """The first error is the cause; later ones say what failed because of it."""
    return errors[0].strip() if errors else ""


def _add_profile(builder: Any, network: Any, config: Any, shapes: Mapping[str, Any]) -> None:
    inputs = [network.get_input(k) for k in range(network.num_inputs)]
    if not any(value.name in shapes for value in inputs):
        return
    profile = builder.create_optimization_profile()
    for value in inputs:
        if value.name in shapes:
            sizes = [tuple(shape) for shape in shapes[value.name]]
            (profile.set_shape_input if value.is_shape_tensor else profile.set_shape)(value.name, *sizes)
    config.add_optimization_profile(profile)


def _open_cache(config: Any, path: str) -> Any:
    if not path:
        return None
    held = Path(path)
    cache = config.create_timing_cache(held.read_bytes() if held.exists() else b"")
    config.set_timing_cache(cache, True)  # a cache of another machine is taken for what it is worth
    return cache


def _inspect(library: Any, logger: Any, blob: Any) -> str:
    """The inspector's JSON of the whole engine; "" when the engine cannot be loaded here."""
    engine = None
    with suppress(Exception):
        engine = library.Runtime(logger).deserialize_cuda_engine(blob)
    if engine is None:
        return ""
    return str(engine.create_engine_inspector().get_engine_information(library.LayerInformationFormat.JSON))
