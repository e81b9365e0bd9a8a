"""The kernels TensorRT-RTX makes of models, ahead of time and without a GPU, in child processes.

A failed build poisons the next one of the same process, and some graphs crash the library: a child ends with the first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest

from onnxq.backends.engine import Kernel, Tensor
from onnxq.backends.trt.kernels import read_layers_message

needs_rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
HEAVY = ("correlation", "gemm", "deconv", "runtime_fusion")


def is_heavy(kernel: Kernel) -> bool:
    return kernel.kind in HEAVY or "mha" in kernel.name


def runs_int8(kernel: Kernel) -> bool:
    return is_heavy(kernel) and "int8" in list_types(kernel.inputs)


def list_types(tensors: Sequence[Tensor]) -> list[str]:
    return [tensor.dtype for tensor in tensors]


def kernels(model: onnx.ModelProto, folder: Path, *, sm: int = 86) -> list[Kernel]:
    """Build for compute capability `sm`; AssertionError with TensorRT's words when it refuses."""
    made, words = _build([model], folder, sm)
    assert made, words
    return made[0]


def kernels_by_name(models: Mapping[str, onnx.ModelProto], folder: Path) -> dict[str, list[Kernel]]:
    """The kernels of models up to the first that is refused, in one process: loading the library takes longest."""
    return dict(zip(models, _build(list(models.values()), folder, 86)[0], strict=False))


def _build(models: Sequence[onnx.ModelProto], folder: Path, sm: int) -> tuple[list[list[Kernel]], str]:
    paths = [folder / f"model{k}.onnx" for k in range(len(models))]
    for model, path in zip(models, paths, strict=True):
        onnx.save(model, path)
    command = [sys.executable, __file__, str(sm), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    texts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"Layers:')]
    return [list(read_layers_message(text)) for text in texts], done.stdout[-2000:] + done.stderr[-2000:]


def _main(sm: str, *paths: str) -> int:
    return next((1 for path in paths if _print_layers(path, sm)), 0)


def _print_layers(path: str, sm: str) -> int:
    import tensorrt_rtx as trt

    said: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, _severity: object, message: str) -> None:
            said.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(path):
        print([parser.get_error(k).desc() for k in range(parser.num_errors)])
        return 1
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    profile = builder.create_optimization_profile()
    for k in range(network.num_inputs):
        given = network.get_input(k)
        shapes = [[size if dim < 0 else dim for dim in given.shape] for size in (1, 4, 8)]
        profile.set_shape(given.name, *shapes)
    config.add_optimization_profile(profile)
    if builder.build_serialized_network(network, config) is None:
        print(said[-5:])
        return 1
    print(json.dumps(next(text for text in reversed(said) if text.startswith("Layers:"))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
