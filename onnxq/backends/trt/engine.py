"""TensorRT and TensorRT for RTX as engines; their libraries and Polygraphy load at first use."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from onnxq.backends import engine
from onnxq.backends.trt.build import build_engine
from onnxq.backends.trt.cuda import count_gpus
from onnxq.backends.trt.kernels import INSPECTION, LAYERS, read_inspector, read_layers_message
from onnxq.backends.trt.run import POLYGRAPHY, TrtRunner, build_trt
from onnxq.backends.trt.timing import time_engines, time_job
from onnxq.errors import ConfigError, VerificationError
from onnxq.graph import LAYOUT_OPS, Dims, GraphIndex, ModelLike, NodeRef
from onnxq.sites import EngineOptions, JsonObject, Names, Refusal

# Compute capability that is built for where none is asked for: GeForce 30.
CAPABILITY = "8.6"
# That of the GPU in this machine.
CURRENT = "current"
_LINKS = "links"
# Int8 kernels need 8.0 or more.
_TURING = (7, 5)
# Nodes behind a product in which TensorRT looks for work to do on the weight beforehand, as far as was seen.
_NEAR = 4
# Operators that only move data: a quantization is carried over them.
_MOVES = LAYOUT_OPS | {"Slice", "Expand", "Add"}
_CUT_UP = "its result is cut up, which TensorRT does to the weight instead, in float: give its result a pair"


class TrtEngine(engine.Engine):
    """TensorRT, which builds for the GPU of this machine."""

    name = "tensorrt"
    title = family = "TensorRT"
    place = "for the GPU of this machine"
    module = "tensorrt"
    packages: Names = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
    install = "pip install 'onnxq[trt]'"
    unable_fix = (
        "run it where there is one, or use `engine='tensorrt-rtx'`, which builds without a GPU"
    )
    takes = frozenset({"plugin"})
    shows_inner = True
    # Parts of kinds in TensorRT-RTX's words, then in TensorRT's. Others (kgen, reformat, pointwise) compute bias,
    # activation and quantization around it. Fused attention is listed as a generated kernel; its name tells it.
    words = engine.KernelWords(
        products=(
            "correlation",
            "gemm",
            "deconv",
            "runtime_fusion",
            "convolution",
            "caskflattenconvolution",
            "fusion",
            "fully_connected",
            "matrix",
            "mha",
            "attention",
            "conv",
        ),
        pools=("maxpool", "avgpool", "pooling"),
        attention="_mha",
        dequantizes="runtime_fusion",
    )
    no_kernel = frozenset(
        {"ConvTranspose", "AveragePool", "LpPool", "GlobalAveragePool", "LSTM", "GRU", "RNN"}
    )
    purposes = MappingProxyType(
        {
            "matmul-qkv": "it keeps the product in front of it in int8, whose weight TensorRT would else cut up in "
            "float: its own integers are read by none, and cost rounding only"
        }
    )
    saved = MappingProxyType(
        {engine.LOG: "build.log", LAYERS: LAYERS, INSPECTION: LAYERS, engine.ENGINE: "model.engine"}
    )

    def build(self, job: engine.Job, folder: Path) -> engine.BuildResult:
        """Build the model in `folder`, and write the engine and the list of its kernels there."""
        return build_engine(self, job, folder)

    def read_kernels(self, model: ModelLike, folder: Path) -> engine.Kernels:
        """The kernels that the inspector or the log lists."""
        inspection = folder / INSPECTION
        if inspection.exists():
            return read_inspector(inspection.read_text(encoding="utf-8"))
        return read_layers_message((folder / LAYERS).read_text(encoding="utf-8"))

    def explain_capability(self, capability: engine.ComputeCapability) -> str:
        """Turing has none."""
        return "int8 kernels need compute capability 8.0 or more" if capability == _TURING else ""

    def explain_operand(self, node: NodeRef, scale: Dims | None, role: str) -> str:
        """A scale of shape [1] counts as one for each channel."""
        if node.op_type != "Conv" or scale != (1,):
            return ""
        return f"the scale of its {role} has shape [1], which TensorRT takes for one scale per channel: make it []"

    def explain_result(self, index: GraphIndex, node: NodeRef) -> str:
        """TensorRT slices a product's weight instead of its result, and dequantizes the slices before it runs."""
        for _ in range(_NEAR):
            readers = index.readers(node.result)
            if any(reader.op_type in ("Slice", "Split") for reader in readers):
                return _CUT_UP
            if len(readers) != 1 or readers[0].op_type not in _MOVES:
                return ""
            node = readers[0]
        return ""

    def find_obstacle(self) -> Refusal | None:
        """Why an engine cannot be run on this machine."""
        if not self.installed:
            cause = "TensorRT is not installed"
            where = "on a machine with an NVIDIA GPU ('onnxq[trt-rtx]' for TensorRT for RTX)"
            fix = f"pip install 'onnxq[trt]' 'onnxq[polygraphy]' {where}"
        elif find_spec("polygraphy") is None:
            cause = "Polygraphy, which runs its engines, is not installed"
            fix = POLYGRAPHY
        elif not count_gpus():
            missing = "there is no NVIDIA GPU (or no driver) to run an engine on"
            cause = f"{self.module} is installed, but {missing}"
            fix = "run `onnxq diff` with `out=…` on a machine with one, and take its folder as `load=…` here"
        else:
            return None
        return Refusal(self.name, cause, fix, code="R111")

    @contextmanager
    def open_runner(
        self, name: str, model: ModelLike, job: engine.Job, folder: Path
    ) -> Iterator[engine.Runner]:
        """Build an engine for this machine's GPU and run it with Polygraphy."""
        with TrtRunner(self, name, build_trt(self, model, job, folder), job.plugins) as runner:
            yield runner

    def demand_device(self, subject: str) -> None:
        """Timing takes the GPU and no Polygraphy."""
        if self.installed and count_gpus():
            return
        cause = (
            "this machine has no NVIDIA GPU, or no driver"
            if self.installed
            else "TensorRT is not installed"
        )
        fix = f"take `placement='rules'`, or a machine with one and {TrtEngine.install}"
        raise VerificationError(
            subject, f"TensorRT's engines are timed on a GPU: {cause}", fix, code="Q708"
        )

    def time_models(
        self, models: Mapping[str, engine.TimedModel], timing: engine.Timing
    ) -> engine.EngineTimes:
        """Time engines on this machine's GPU, each launched kernel by kernel and as a CUDA graph."""
        return time_engines(self, models, timing)

    def run_job(self, job: JsonObject, folder: Path) -> JsonObject:
        """Time the engines of a job."""
        return time_job(self, job, folder)


class RtxEngine(TrtEngine):
    """TensorRT for RTX, which builds for any GPU without one."""

    name = "tensorrt-rtx"
    title = "TensorRT for RTX"
    place = "without a GPU"
    module = "tensorrt_rtx"
    packages: Names = ("tensorrt-rtx",)
    install = "pip install 'onnxq[trt-rtx]'"
    takes = frozenset({"plugin", "compute_capability"})
    builds_ahead = True

    def read_capability(self, text: str | None) -> engine.ComputeCapability:
        """(8, 6) for "8.6", the default; () for the GPU of this machine. Raises ConfigError for other text."""
        if text == CURRENT:
            return ()
        # 8.6, 86, sm_86; of sm_120 the last digit is the minor number.
        found = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", (text or CAPABILITY).lower())
        if found is None:
            raise ConfigError(
                f"compute capability {text!r}", "is none", "write it as 8.6", code="Q304"
            )
        return int(found[1]), int(found[2])

    def prepare_environment(self, job: engine.Job, folder: Path) -> EngineOptions:
        """The environment in which the library finds itself when it meets a plugin."""
        home = find_spec("tensorrt_rtx_libs") if job.plugins and sys.platform == "linux" else None
        if home is None:
            return {}
        # The parser loads libtensorrt_rtx.so by this name when it meets a plugin, and ends the process where it is not
        # found; the wheel holds it under its versioned name only.
        (folder / _LINKS).mkdir(exist_ok=True)
        for library in Path(next(iter(home.submodule_search_locations or ()))).glob(
            "libtensorrt_rtx.so.*"
        ):
            link = folder / _LINKS / "libtensorrt_rtx.so"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
        paths = (str(folder / _LINKS), os.environ.get("LD_LIBRARY_PATH"))
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}

    def find_local(self) -> engine.Engine:
        """TensorRT where there are a GPU and the library."""
        usual = TrtEngine()
        return usual if usual.installed and count_gpus() else self

    def choose_device(self, capability: str | None) -> tuple[str | None, engine.Untimed | None]:
        """Builds for another GPU cannot be timed, and none can without one."""
        if capability is not None:
            return capability, engine.Untimed.OTHER_GPU
        return (CURRENT, None) if count_gpus() else (None, engine.Untimed.NO_GPU)
