"""Qualcomm's HTP as an engine: its compiler and its emulator run here, with no device; their library loads at use."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from onnxq.backends.engine import (
    ENGINE,
    LOG,
    BuildResult,
    DevicePlacement,
    Engine,
    Job,
    Kernels,
    KernelWords,
    Runner,
)
from onnxq.backends.qnn.kernels import NEEDS, TRACE, read_kernels, read_placement
from onnxq.backends.serving import serve_model
from onnxq.errors import ModelError
from onnxq.graph import QUANTIZE, GraphIndex, ModelLike, NodeRef, get_index
from onnxq.runtime import tap_tensors
from onnxq.sites import EngineOptions, JsonObject, Names

if TYPE_CHECKING:
    from onnxq.config.data import RuntimeConfig

# Snapdragon X, the chip of Windows laptops; 8 Gen 2, of phones, has the same HTP, and newer chips run what it runs.
_SOC = "60"
_ARCHITECTURE = "73"


# The pair behind these does their work.
_BOUNDS = ("Relu", "Clip")


class QnnEngine(Engine):
    """ONNX Runtime's QNN execution provider with Qualcomm's library for x86, which compiles and emulates."""

    name = "qnn"
    title = family = "Qualcomm HTP"
    place = "for Snapdragon's NPU, without one"
    module = "onnxruntime_qnn"
    packages: Names = ("onnxruntime-qnn",)
    install = "pip install 'onnxq[qnn]'"
    needs = f"onnxruntime-qnn, which needs {NEEDS},"
    unable_fix = f"it needs {NEEDS}"
    takes = frozenset({"soc", "htp_arch"})
    shows_inner = True
    one_size = True
    compiles = True
    emulated = judges = True
    words = KernelWords(
        products=("conv", "fullyconnected", "matmul", "lstm", "gru"), pools=("pool",), integers=True
    )
    saved = MappingProxyType({LOG: "build.log", TRACE: TRACE, ENGINE: "model.compiled.onnx"})
    options: EngineOptions = MappingProxyType({"soc_model": _SOC, "htp_arch": _ARCHITECTURE})

    def with_options(self, runtime: RuntimeConfig) -> Engine:
        """The engine for a chip of this name or number, and this architecture of the HTP."""
        given = {"soc_model": runtime.soc, "htp_arch": runtime.htp_arch.lower().removeprefix("v")}
        chosen = {name: value for name, value in given.items() if value}
        if not chosen:
            return self
        engine = copy.copy(self)
        # Without an architecture the library takes the chip's own.
        engine.options = chosen
        return engine

    def build(self, job: Job, folder: Path) -> BuildResult:
        """Compile the model in `folder`; the compiled model and the provider's record are left there."""
        from onnxq.backends.qnn.build import compile_folder

        return compile_folder(job, folder)

    def read_kernels(self, model: ModelLike, folder: Path) -> Kernels:
        """The operators of the composed graphs, before the HTP's own optimizer."""
        return read_kernels(model, folder)

    def read_placement(self, model: ModelLike, folder: Path) -> DevicePlacement:
        """The partitions on the NPU, and the nodes that the provider left to the CPU."""
        return read_placement(model, folder)

    def explain_result(self, index: GraphIndex, node: NodeRef) -> str:
        """Integer kernels take their scale of the result from the pair behind it."""
        weight = index.maker(node, 1)
        if weight is not None and weight.attrs.get("block_size"):
            return "its weight is in blocks, which the HTP multiplies in float16"
        readers = index.readers(node.result)
        if len(readers) == 1 and readers[0].op_type in _BOUNDS:
            readers = index.readers(readers[0].result)
        if any(reader.op_type == QUANTIZE for reader in readers):
            return ""
        return "its result is not quantized, and the HTP computes in integers only where it is"

    def open_runner(
        self, name: str, model: ModelLike, job: Job, folder: Path
    ) -> AbstractContextManager[Runner]:
        """Compile the model, and emulate it in a process of its own.

        With `debug_tensors` integers of quantized tensors are outputs, too. Raises ModelError for samples of several
        sizes.
        """
        for value, sizes in job.shapes.items():
            if len(set(sizes)) > 1:
                listed = ", ".join(dict.fromkeys("x".join(map(str, size)) for size in sizes))
                cause = f"a compiled model takes one size, and samples have {listed}"
                raise ModelError(f"input {value}", cause, "give samples of one size", code="Q115")
        tapped = _tap_quantized(model) if job.debug_tensors else model
        return serve_model(self, name, tapped, job, folder)

    def run_job(self, job: JsonObject, folder: Path) -> JsonObject:
        """Answer samples with the compiled model in `folder` until there are no more."""
        from onnxq.backends.qnn.build import answer_compiled

        return answer_compiled(job, folder)


def _tap_quantized(model: ModelLike) -> ModelLike:
    """The model with the integers of quantized activations as outputs: fusions need them anyway, and stay."""
    index = get_index(model)
    makers = (node for node in index.nodes if node.op_type == QUANTIZE and not node.scope)
    wanted = [node.result for node in makers if not index.has_constant(node, 0)]
    return tap_tensors(model, wanted).proto
