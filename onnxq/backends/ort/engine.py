"""ONNX Runtime as an engine: a build is the graph that it optimizes a model into."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import onnx

from onnxq.backends.engine import (
    ENGINE,
    LOG,
    MODEL,
    BuildResult,
    BuildState,
    Engine,
    EngineTimes,
    Job,
    Kernels,
    KernelWords,
    TimedModel,
    Timing,
)
from onnxq.backends.ort.kernels import INT8_KERNELS, PACKED_KERNELS, read_optimized
from onnxq.errors import MissingDependencyError, ModelError
from onnxq.graph import GraphIndex, ModelLike, NodeRef
from onnxq.graph.scopes import walk_graphs
from onnxq.graph.verify import QUANTIZE
from onnxq.runtime import NodeError, UnknownOperatorError, declare_types, detect_cpu, optimize_graph, time_models
from onnxq.sites import Caution, Refusal

# The graph with the names of the model's tensors, before they are laid out anew.
OPTIMIZED = "optimized.onnx"
_ACTIVATIONS = frozenset(
    ("Relu", "Clip", "LeakyRelu", "HardSwish", "HardSigmoid", "Sigmoid", "Gelu", "Elu", "PRelu", "Tanh", "Mul", "Mish")
)
_SIGNED = (
    "its input is int8, which ONNX Runtime on x86 turns into uint8 one tensor at a time and not everywhere: quantize "
    "activations to uint8"
)
_DEQUANTIZED = "its weight alone is quantized, and dequantized in each run"
# Operators that ONNX Runtime 1.32 reads the integers of a weight beside float data in, and those that keep it from it.
_ALONE, _BOUNDS = ("MatMul", "Gemm"), ("Relu", "Clip")


class OrtEngine(Engine):
    """ONNX Runtime on the CPU of this machine, or on one of its providers."""

    name = "ort"
    title = family = "ONNX Runtime"
    place = "for this CPU"
    module = "onnxruntime"
    packages = ("onnxruntime", "onnxruntime-gpu")
    install = "pip install 'onnxq[cpu]'"
    takes = frozenset({"ort_library", "provider"})
    any_size = True
    saturates = True
    packs_weights = False
    words = KernelWords(
        products=("gemm", "conv", "attention"), pools=("maxpool",), int8=INT8_KERNELS, packed=PACKED_KERNELS
    )
    no_kernel = frozenset({"ConvTranspose", "GRU", "RNN", "Einsum", "LpPool", "GlobalMaxPool"})
    saved = MappingProxyType({LOG: "build.log", ENGINE: "optimized.onnx"})

    def build(self, job: Job, folder: Path) -> BuildResult:
        """Optimize the model. Beside the graph as it runs (`engine`), the one before tensors are laid out anew:

        same fusions, but every tensor that survives still has its own name, by which kernels find their nodes.
        """
        start = time.perf_counter()
        try:
            for layout, name in ((True, ENGINE), (False, OPTIMIZED)):
                optimized = optimize_graph(folder / MODEL, layout=layout, libraries=job.operators)
                declare_types(optimized)
                onnx.save(optimized, folder / name)
        except MissingDependencyError as error:
            return BuildResult(state=BuildState.MISSING, reason=error.cause)
        except UnknownOperatorError as error:
            reason = f"{error.subject}: {error.cause}; {error.fix}"
            return BuildResult(state=BuildState.REFUSED, reason=reason, node=error.node)
        except ModelError as error:
            node = error.node if isinstance(error, NodeError) else ""
            return BuildResult(state=BuildState.REFUSED, reason=error.cause, node=node)
        return BuildResult(state=BuildState.BUILT, seconds=time.perf_counter() - start)

    def read_kernels(self, model: ModelLike, folder: Path) -> Kernels:
        """The nodes of the optimized graph."""
        return read_optimized(model, self.read_optimized(folder))

    def read_optimized(self, folder: Path) -> onnx.ModelProto:
        """The graph that the kernels are nodes of."""
        return onnx.load(folder / OPTIMIZED)

    def list_kernels(self, model: ModelLike) -> Kernels:
        """The kernels of a model, optimized in this process."""
        return read_optimized(model, optimize_graph(model, layout=False))

    def list_warnings(self, folder: Path) -> Iterator[Caution]:
        """Kernels are found in the graph before tensors are laid out anew; warn when that changes them."""
        before, after = (_count_integer_kernels(onnx.load(folder / name)) for name in (OPTIMIZED, ENGINE))
        if before != after:
            counts = ", ".join(f"{kind} {before[kind]} -> {after[kind]}" for kind in sorted(before | after))
            text = f"the last step of ONNX Runtime's optimization changes the integer kernels: {counts}"
            yield Caution("W112", text)

    def explain_weight(self, index: GraphIndex, node: NodeRef) -> str:
        """Why the integers of a weight alone are not read."""
        if node.op_type not in _ALONE:
            return f"{_DEQUANTIZED}: ONNX Runtime reads integers beside float data in {' and '.join(_ALONE)} alone"
        readers = index.readers(node.result)
        if len(readers) == 1 and readers[0].op_type in _BOUNDS:
            # It looks for the QuantizeLinear of an int8 product behind these, and gives up where none is.
            return f"{_DEQUANTIZED}: ONNX Runtime makes no MatMulNBits with {readers[0].op_type} right behind it"
        return _DEQUANTIZED

    def explain_result(self, index: GraphIndex, node: NodeRef) -> str:
        """Most operators are fused only when their result is quantized too."""
        # A MatMul becomes MatMulIntegerToFloat instead, which writes floats.
        if node.op_type == "MatMul":
            return ""
        between: list[str] = []
        while True:
            readers = index.readers(node.result)
            if any(reader.op_type == QUANTIZE for reader in readers):
                break
            if len(readers) != 1 or readers[0].op_type not in _ACTIVATIONS:
                return "its result is not quantized, and ONNX Runtime fuses it only then"
            node = readers[0]
            between.append(node.op_type)
        if between:
            return f"{' and '.join(between)} between it and QuantizeLinear changes what the pair saturates by itself"
        return ""

    def explain_data(self, dtype: str) -> str:
        """Signed data keeps many products in float."""
        return _SIGNED if dtype == "int8" else ""

    def find_obstacle(self) -> Refusal | None:
        """None: without ONNX Runtime there is no reference either."""
        return None

    def time_models(self, models: Mapping[str, TimedModel], timing: Timing) -> EngineTimes:
        """Time the models themselves: the graphs that builds leave are bound to no session."""
        feeds = next(iter(models.values())).feeds
        # No early end, since rare slow runs count here.
        times = time_models(
            {name: entry.model for name, entry in models.items()},
            feeds,
            threads=timing.threads,
            rounds=timing.rounds,
            seconds=timing.seconds,
            precision=0.0,
            provider=timing.provider,
        )
        return EngineTimes(device=detect_cpu(), eager=times)


def _count_integer_kernels(optimized: onnx.ModelProto) -> Counter[str]:
    """How many nodes compute on integers, by operator, all scopes together."""
    kinds = (node.op_type for _, graph in walk_graphs(optimized.graph) for node in graph.node)
    return Counter(kind for kind in kinds if kind in INT8_KERNELS)
