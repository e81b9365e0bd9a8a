"""The kernels TensorRT-RTX makes of models, ahead of time and without a GPU, in child processes.

A failed build poisons the next one of the same process, and some graphs crash the library: a child ends with the first.
"""

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

_CHILD = Path(__file__).with_name("rtx_child.py")
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
    command = [sys.executable, str(_CHILD), str(sm), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    texts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"Layers:')]
    return [list(read_layers_message(text)) for text in texts], done.stdout[-2000:] + done.stderr[-2000:]
