"""Qualcomm's HTP as an engine: its compiler and its emulator run here, with no device; their library loads at use.

ONNX Runtime's QNN execution provider is a plugin. In the child process Qualcomm's library for x86 compiles for every
chip and emulates the HTP that runs the result; all that it prints goes into the log. The provider writes each graph as
JSON, with the type and encoding of each tensor, and a record of the nodes behind each operator. Both have the names of
the graph after ONNX Runtime's first rewrites.
"""

from __future__ import annotations

import copy
import json
import os
import re
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxq.backends import engine
from onnxq.backends.engine import ENGINE, LOG, MODEL, BuildResult, BuildState, Job, Kernel, Tensor
from onnxq.backends.serving import Answer, answer_samples, serve_model
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, ModelLike, bare_proto, fix_sizes, get_index, walk_graphs
from onnxq.graph.base import DEQUANTIZE, QUANTIZE, NodeRef
from onnxq.graph.scopes import has_bodies
from onnxq.runtime import tap_tensors
from onnxq.runtime.session import find_plugin_device, open_plugin_session
from onnxq.sites import EngineOptions, JsonObject, Names, Refusal, drop_repeats

if TYPE_CHECKING:
    from onnxq.config.data import RuntimeConfig

# The provider's record of which node became which operator, and the folder of the graphs that it composed.
TRACE = "qnn_op_trace.json"
GRAPHS = "graphs"
# For other CPUs there are packages, too, whose library offers no device where there is no such chip.
NEEDS = "a CPU of x86, Python 3.11, onnxruntime 1.24.2, and Windows, or Linux with glibc 2.35, or newer ones"
# A node that was laid out anew, or a DequantizeLinear that each reader got for itself.
_RENAMED = re.compile(r"(.+?)(?:/duplicated(?:_\d+)?)?(?:_token_\d+)?")
# QNN writes a type as its kind in the upper byte, and its bits in the lower one as two decimal digits.
_KINDS = {0: "int", 1: "uint", 2: "float", 3: "int", 4: "uint", 5: "bool"}
# QNN_TENSOR_TYPE_STATIC: a constant.
_STATIC = 4
# QNN_QUANTIZATION_ENCODING_SCALE_OFFSET, the one with a single scale.
_ONE_SCALE = 0
# …_BW_SCALE_OFFSET, …_BW_AXIS_SCALE_OFFSET, and that of blocks for a kernel in float16.
_NARROW = (2, 3, 11)
_MOVES = ("Quantize", "Dequantize", "Convert", "Cast", "Transpose", "Reshape")
# Pairs at inputs and outputs of the model, which stay on the CPU so that the application may feed and read integers.
_BORDER = re.compile("configured to not take D?Q nodes that")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
REFUSED = re.compile(r"failed for node `([^`]+)` of type `([^`]+)` with error code (\d+)")
_PAIRS = (
    "give it pairs on all inputs and on its output, uint8 or "
    "uint16 for data and int8 for weights, or leave it float"
)
# The provider's reasons, and a step that a person can take; the first that fits holds.
_FIXES = (
    (r"Cannot get shape|[Dd]ynamic shape", "fix all sizes of the model"),
    (r"`Erf`", "quantize with onnxq, which fuses Gelu to a single node, or export Gelu as one"),
    (
        r"Operators of type",
        "write it with operators that the NPU has, or move it to the model's beginning or end",
    ),
    (r"standalone DQ op with per-channel", f"its reader has no kernel for such a weight: {_PAIRS}"),
    (r"INT16-quantized", "weights in blocks take 16-bit activations"),
    (r"int4|4-bit|BQ|LPBQ", "4-bit weights take 16-bit activations and symmetric scales"),
    (
        r"per-tensor|per-channel|axis",
        "take one scale a tensor, or for weights one an output channel",
    ),
    (r"constant|initializer|static", "make this input a constant of the model"),
    (r"[Dd]ynamic scales|DynamicQuantize", "quantize with static scales (`mode: static`)"),
    (r"as (Conv|DepthWise|Transpose|FullyConnected|MatMul)", _PAIRS),
    (
        r"validator of the HTP|Failed to add",
        "it has no kernel for such types or sizes: change them, or accept the CPU",
    ),
    (
        r"1002|[Ff]inalize",
        "the compiler gives up: quantize what is float, or find the part by `reduce=True`",
    ),
)
# Snapdragon X, the chip of Windows laptops; 8 Gen 2, of phones, has the same HTP, and newer chips run what it runs.
_SOC = "60"
_ARCHITECTURE = "73"
# The pair behind these does their work.
_BOUNDS = ("Relu", "Clip")
PROVIDER = "QNNExecutionProvider"
_NODE = re.compile(r"[Nn]ode:? ?[`'\"]([^`'\"]+)[`'\"]")
# The library goes on with the chip that it takes by default.
_UNKNOWN_CHIP = re.compile(r"(Unrecognized soc_model|Invalid HTP architecture).*")
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : -?\d+ : [A-Z_]+ : ")


class QnnEngine(engine.Engine):
    """ONNX Runtime's QNN execution provider with Qualcomm's library for x86, which compiles and emulates."""

    name = "qnn"
    title = family = "Qualcomm HTP"
    place = "for Snapdragon's NPU, without one"
    module = "onnxruntime_qnn"
    packages: Names = ("onnxruntime-qnn",)
    install = 'pip install "onnxq[qnn]"'
    needs = f"onnxruntime-qnn, which needs {NEEDS},"
    unable_fix = f"it needs {NEEDS}"
    takes = ("soc", "htp_arch")
    shows_inner = True
    one_size = True
    compiles = True
    emulated = judges = True
    words = engine.KernelWords(
        products=("conv", "fullyconnected", "matmul", "lstm", "gru"), pools=("pool",), integers=True
    )
    saved = MappingProxyType({LOG: "build.log", TRACE: TRACE, ENGINE: "model.compiled.onnx"})
    options: EngineOptions = MappingProxyType({"soc_model": _SOC, "htp_arch": _ARCHITECTURE})

    def with_options(self, runtime: RuntimeConfig) -> engine.Engine:
        """The engine for a chip of this name or number, and this architecture of the HTP."""
        given = {"soc_model": runtime.soc, "htp_arch": runtime.htp_arch.lower().removeprefix("v")}
        chosen = {name: value for name, value in given.items() if value}
        if not chosen:
            return self
        own = copy.copy(self)
        # Without an architecture the library takes the chip's own.
        own.options = chosen
        return own

    def build(self, job: Job, folder: Path) -> BuildResult:
        """Compile the model in `folder`; the compiled model and the provider's record are left there."""
        try:
            import onnxruntime_qnn  # noqa: F401
        except ImportError as error:
            return BuildResult(state=BuildState.MISSING, reason=f"{error}; it needs {NEEDS}")
        with open(folder / LOG, "ab") as sink:
            for stream in (1, 2):
                os.dup2(sink.fileno(), stream)
        start = time.perf_counter()
        try:
            device = _find_device()
        except Exception as error:  # ONNX Runtime's own kinds have no common base
            return BuildResult(state=BuildState.UNABLE, reason=_clean(error))
        proto = onnx.load(folder / MODEL, load_external_data=False)
        # The provider takes no node whose shapes are not known.
        if job.shapes:
            proto = fix_sizes(proto, {name: profile[0] for name, profile in job.shapes.items()})
            onnx.save(proto, folder / MODEL)
        # The provider takes a path without an ending for a folder.
        compiled = folder / "compiled.onnx"
        reason = ""
        try:
            _compile(device, job.options, proto, folder, compiled)
        except Exception as error:
            reason = _clean(error)
        if compiled.exists():
            compiled.rename(folder / ENGINE)
        # Without colours, and for people.
        (folder / LOG).write_text("\n".join(read_log(folder)), encoding="utf-8")
        return replace(_judge_build(folder, reason), seconds=time.perf_counter() - start)

    def read_kernels(self, model: ModelLike, folder: Path) -> engine.Kernels:
        """The operators of the composed graphs, before the HTP's own optimizer."""
        names = NodeNames(model)
        kernels = []
        for part in _read_record(folder)["subgraph_traces"]:
            graph = json.loads(
                (folder / GRAPHS / f"{part['graph_name']}.json").read_text(encoding="utf-8")
            )["graph"]
            tensors = {name: _read_tensor(name, entry) for name, entry in graph["tensors"].items()}
            constants = {
                name for name, entry in graph["tensors"].items() if entry["type"] == _STATIC
            }
            for mapping in part["op_mappings"]:
                node = graph["nodes"][mapping["dst_name"]]
                sources = (
                    names.find_node(source["name"])
                    for source in mapping["sources"]
                    if source["type"] == "OP"
                )
                kernels.append(
                    Kernel(
                        name=mapping["dst_name"],
                        kind=node["type"],
                        nodes=drop_repeats(filter(None, sources)),
                        inputs=tuple(
                            tensors[name] for name in node["input_names"] if name not in constants
                        ),
                        weights=tuple(
                            tensors[name] for name in node["input_names"] if name in constants
                        ),
                        outputs=tuple(tensors[name] for name in node["output_names"]),
                        moves=node["type"] in _MOVES,
                    )
                )
        return tuple(kernels)

    def read_placement(self, model: ModelLike, folder: Path) -> engine.DevicePlacement:
        """The partitions on the NPU, and the nodes that the provider left to the CPU."""
        names = NodeNames(model)
        record = _read_record(folder)
        refused = {
            names.find_node(word[1]): word
            for line in read_log(folder)
            if (word := REFUSED.search(line))
        }
        reasons = {}
        for entry in record["unsupported_nodes"]:
            node = names.find_node(entry["node_name"])
            if node and not _BORDER.search(entry["reason"]):
                word = refused.get(node)
                reasons[node] = describe_refusal(word) if word else entry["reason"]
        pairs = {node for node in reasons if names.operators[node] in (QUANTIZE, DEQUANTIZE)}
        # A pair is refused with its operator, whose reason says it already.
        own = {reasons[node] for node in reasons if node not in pairs} | {"Failed to add node."}
        return engine.DevicePlacement(
            partitions=len(record["subgraph_traces"]),
            left=tuple(
                Refusal(node, reason, find_fix(reason), code="R116")
                for node, reason in reasons.items()
                if node not in pairs or reason not in own
            ),
        )

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
    ) -> AbstractContextManager[engine.Runner]:
        """Compile the model, and emulate it in a process of its own.

        With `debug_tensors` integers of quantized tensors are outputs, too. Raises ModelError for samples of several
        sizes.
        """
        for value, sizes in job.shapes.items():
            if len(set(sizes)) > 1:
                listed = ", ".join(drop_repeats("x".join(map(str, size)) for size in sizes))
                cause = f"a compiled model takes one size, and samples have {listed}"
                raise ModelError(f"input {value}", cause, "give samples of one size", code="Q115")
        tapped = _tap_quantized(model) if job.debug_tensors else model
        return serve_model(self, name, tapped, job, folder)

    def run_job(self, job: JsonObject, folder: Path) -> JsonObject:
        """Answer samples with the compiled model in `folder` until there are no more."""

        def open_model() -> Answer:
            session = open_plugin_session(
                _find_device(), folder / ENGINE, {**_find_backend(), **job["options"]}
            )
            names = [value.name for value in session.get_outputs()]
            return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))

        answer_samples(open_model, _clean, folder)
        return {}


def _tap_quantized(model: ModelLike) -> ModelLike:
    """The model with the integers of quantized activations as outputs: fusions need them anyway, and stay."""
    index = get_index(model)
    makers = (node for node in index.nodes if node.op_type == QUANTIZE and not node.scope)
    wanted = [node.result for node in makers if not index.has_constant(node, 0)]
    return tap_tensors(model, wanted).proto


class NodeNames:
    """Finds the nodes of a model by the names that ONNX Runtime's rewrites gave them."""

    def __init__(self, model: ModelLike) -> None:
        graphs = (graph for _, graph in walk_graphs(bare_proto(model).graph))
        self.operators = {node.name: node.op_type for graph in graphs for node in graph.node}

    def find_node(self, name: str) -> str:
        """The node of the model; "" for one that was put in."""
        if name in self.operators:
            return name
        renamed = _RENAMED.fullmatch(name)
        base = renamed[1] if renamed else ""
        # The names of nodes that were put in begin with their operator alone.
        return base if self.operators.get(base, base) != base else ""


def _read_record(folder: Path) -> JsonObject:
    record: JsonObject = json.loads((folder / TRACE).read_bytes())
    return record


def _read_tensor(name: str, entry: JsonObject) -> Tensor:
    kind, digits = divmod(entry["data_type"], 256)
    dtype = f"{_KINDS.get(kind, '')}{digits:x}"
    # The HTP has no float32 arithmetic: it takes and gives such tensors, and computes in float16.
    dtype = {"float32": "float16", "bool8": "bool"}.get(dtype, dtype)
    encoding = entry["quant_params"]
    layout = ""
    if encoding["definition"] == 1:
        scale = encoding["scale_offset"]
        one = encoding["encoding"] == _ONE_SCALE
        layout = (
            f"scale {scale['scale']:.6g}, zero point {-scale['offset']}"
            if one
            else "several scales"
        )
        # The provider writes every encoding as if it were of that kind. Those of fewer bits begin with their number.
        if encoding["encoding"] in _NARROW:
            dtype = f"{_KINDS[kind]}{np.float32(scale['scale']).view(np.uint32)}"
    return Tensor(name=name, dtype=dtype, shape=tuple(entry["dims"]), layout=layout)


def describe_refusal(word: re.Match[str]) -> str:
    """The word of Qualcomm's validator, which gives no reason. word: a match of REFUSED."""
    return f"the validator of the HTP refuses it as {word[2]} (error {word[3]})"


def find_fix(reason: str) -> str:
    """A step against a reason of the provider or of Qualcomm's validator; "" for unknown ones."""
    return next((fix for pattern, fix in _FIXES if re.search(pattern, reason)), "")


def read_log(folder: Path) -> list[str]:
    """The lines of the log, without colours."""
    text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    return _COLOUR.sub("", text).splitlines()


def _judge_build(folder: Path, reason: str) -> BuildResult:
    """How a build ended. reason: the words of ONNX Runtime where it gave no session."""
    lines = read_log(folder)
    chip = next((found[0] for line in lines if (found := _UNKNOWN_CHIP.search(line))), "")
    if chip:
        return BuildResult(state=BuildState.NO_CAPABILITY, reason=chip)
    # Where the library fails before it sees a node, ONNX Runtime goes on without it and says so in the log alone.
    if not reason and not (folder / TRACE).exists():
        reason = next(
            (
                line.partition("] ")[2]
                for line in lines
                if "rror:" in line or "[E:onnxruntime" in line
            ),
            "the provider left no record of its graphs",
        )
    if reason:
        refused = {found[1]: found for line in lines if (found := REFUSED.search(line))}
        blamed = _NODE.search(reason)
        name = blamed[1] if blamed else next(iter(reversed(refused)), "")
        # ONNX Runtime says what follows, and the validator why.
        reason = describe_refusal(refused[name]) if name in refused else reason
        node = NodeNames(onnx.load(folder / MODEL, load_external_data=False)).find_node(name)
        return BuildResult(state=BuildState.FAILED, reason=reason, node=node, fix=find_fix(reason))
    # A model of which no node runs on the NPU has no compiled form: it stays as it is.
    if not (folder / ENGINE).exists():
        (folder / ENGINE).write_bytes((folder / MODEL).read_bytes())
    return BuildResult(state=BuildState.BUILT)


def _clean(error: Exception) -> str:
    return " ".join(_PREFIX.sub("", str(error)).split())


def _find_device() -> Any:
    """The HTP: the NPU of this machine, or its emulator."""
    import onnxruntime_qnn

    return find_plugin_device(PROVIDER, onnxruntime_qnn.get_library_path())


def _compile(
    device: Any, settings: EngineOptions, proto: onnx.ModelProto, folder: Path, compiled: Path
) -> None:
    """Have the provider write the compiled model; the graphs and the record of its nodes go to the folder."""
    (folder / GRAPHS).mkdir(exist_ok=True)
    records = {
        "dump_json_qnn_graph": "1",
        "json_qnn_graph_dir": str(folder / GRAPHS),
        "enable_framework_op_trace": "1",
        "framework_op_trace_dir": str(folder),
    }
    entries = {}
    # Of a model with If, Loop or Scan ONNX Runtime 1.32 writes no compiled form: it loses what their bodies read.
    if not has_bodies(proto.graph):
        records["enable_htp_prepare_only"] = "1"
        entries = {
            "ep.context_enable": "1",
            "ep.context_file_path": str(compiled),
            "ep.context_embed_mode": "1",
        }
    open_plugin_session(device, folder / MODEL, {**_find_backend(), **settings, **records}, entries)


def _find_backend() -> dict[str, str]:
    """The setting by which the provider takes the HTP, and not the GPU or the CPU."""
    import onnxruntime_qnn

    return {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}
