"""TensorRT through Polygraphy: is it here, and a runner for an engine that a child process has built."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx

from onnxq.engines.diff.model import TRT
from onnxq.engines.diff.results import Feeds, polygraphy, quiet
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, save_model
from onnxq.sites import Refusal

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
# A large network takes minutes to build; one that takes longer hangs.
_PATIENCE = 3600.0


def obstacle() -> Refusal | None:
    """Why an engine cannot be run on this machine; None when it can be tried."""
    if library() is None:
        return Refusal(
            TRT,
            "TensorRT is not installed",
            "pip install 'onnxq[trt]' on a machine with an NVIDIA GPU ('onnxq[trt-rtx]' for TensorRT for RTX)",
            code="R111",
        )
    if not _gpus():
        return Refusal(
            TRT,
            f"{library()} is installed, but there is no NVIDIA GPU (or no driver) to run an engine on",
            "run `onnxq diff` with `save=…` on a machine with one, and take its folder as `load=…` here",
            code="R111",
        )
    return None


def library() -> str | None:
    """The TensorRT to use: `tensorrt` where it is installed, else `tensorrt_rtx`, else None."""
    return next((name for name in ("tensorrt", "tensorrt_rtx") if find_spec(name) is not None), None)


def _gpus() -> int:
    """GPUs the driver can use; 0 without a driver."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def choose_library(name: str) -> None:
    """Tell Polygraphy which TensorRT it uses. It decides once, when its TensorRT backend is first imported."""
    polygraphy("config").USE_TENSORRT_RTX = name == "tensorrt_rtx"


def version() -> str:
    """Which TensorRT ran, for reports."""
    name = library() or "tensorrt"
    try:
        found = __import__(name).__version__
    except ImportError:
        return name
    return f"{'TensorRT for RTX' if name == 'tensorrt_rtx' else 'TensorRT'} {found}"


@dataclass(frozen=True)
class Job:
    """What the child builds: paths of model and engine, (min, opt, max) of every input, and which library.

    layers: also emit the tensors that survive fusion. They do not prevent any, unlike outputs would.
    capability: of the GPU to build for, e.g. (8, 6), TensorRT for RTX only; () the one in this machine.
    """

    model: str
    engine: str
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    library: str
    layers: bool
    capability: tuple[int, ...] = ()


def shapes_of(index: GraphIndex, samples: Iterable[Feeds]) -> Shapes:
    """The least, first and largest size of every axis of every input: the engine's optimization profile."""
    low: dict[str, tuple[int, ...]] = {}
    first: dict[str, tuple[int, ...]] = {}
    high: dict[str, tuple[int, ...]] = {}
    names = [value.name for value in index.inputs]
    for feeds in samples:
        for name in names:
            shape = tuple(int(size) for size in feeds[name].shape)
            first.setdefault(name, shape)
            low[name] = tuple(map(min, low.get(name, shape), shape))
            high[name] = tuple(map(max, high.get(name, shape), shape))
    return {name: (low[name], first[name], high[name]) for name in names if name in first}


def build(
    proto: onnx.ModelProto, shapes: Shapes, folder: Path, *, layers: bool = False, capability: tuple[int, ...] = ()
) -> Path:
    """Build an engine for this machine's GPU in a child process, which may crash without harm. Returns its path.

    Raises ModelError with TensorRT's own words when it refuses the model.
    """
    model, engine, job = folder / "model.onnx", folder / "model.engine", folder / "job.json"
    save_model(proto, model, overwrite=True)
    wanted = Job(str(model), str(engine), dict(shapes), library() or "tensorrt", layers, capability)
    job.write_text(json.dumps(asdict(wanted)), encoding="utf-8")
    command = [sys.executable, "-m", "onnxq.engines.diff.build", str(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE, errors="replace")
    except subprocess.TimeoutExpired as error:
        raise ModelError(TRT, f"the engine was not built within {_PATIENCE / 60:.0f} minutes", code="Q115") from error
    if done.returncode or not engine.is_file():
        raise ModelError(TRT, reason(done.returncode, done.stderr + done.stdout), code="Q115")
    return engine


def reason(code: int, text: str) -> str:
    """Why a build ended without an engine: TensorRT's errors, or the signal that killed it."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line.startswith(("[E]", "[!]"))] or [line for line in lines if line][-1:]
    cause = "; ".join(dict.fromkeys(line.removeprefix("[E]").removeprefix("[!]").strip() for line in told[-3:]))
    if code < 0:
        return f"the build crashed (signal {-code})" + (f": {cause}" if cause else "")
    return f"cannot build the engine: {cause or f'exit code {code}'}"


def trt_runner(name: str, engine: Path) -> Any:
    """Polygraphy's TrtRunner over a built engine. Tensors that survived fusion come out with its outputs."""
    choose_library(library() or "tensorrt")
    with quiet():
        backend = polygraphy("backend.trt")
        return backend.TrtRunner(backend.EngineFromPath(str(engine)), name=name)
