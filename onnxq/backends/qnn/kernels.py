"""The graphs that the QNN provider composes, as kernels; the nodes that it leaves to the CPU, with reason and fix.

The provider writes each graph as JSON, with the type and encoding of each tensor, and a record of the nodes behind each
operator. Both have the names of the graph after ONNX Runtime's first rewrites.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from onnxq.backends.engine import LOG, DevicePlacement, Kernel, Kernels, Tensor
from onnxq.graph import DEQUANTIZE, QUANTIZE, ModelLike, bare_proto, walk_graphs
from onnxq.sites import JsonObject, Refusal

# The provider's record of which node became which operator, and the folder of the graphs that it composed.
TRACE = "qnn_op_trace.json"
GRAPHS = "graphs"
NEEDS = "Python 3.11, onnxruntime 1.24.2, and Windows, or Linux with glibc 2.35, or newer ones"
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


def read_kernels(model: ModelLike, folder: Path) -> Kernels:
    """The operators of all graphs in the order of the record."""
    names = NodeNames(model)
    kernels = []
    for part in _read_record(folder)["subgraph_traces"]:
        graph = json.loads(
            (folder / GRAPHS / f"{part['graph_name']}.json").read_text(encoding="utf-8")
        )["graph"]
        tensors = {name: _read_tensor(name, entry) for name, entry in graph["tensors"].items()}
        constants = {name for name, entry in graph["tensors"].items() if entry["type"] == _STATIC}
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
                    nodes=tuple(dict.fromkeys(filter(None, sources))),
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


def _read_record(folder: Path) -> JsonObject:
    record: JsonObject = json.loads((folder / TRACE).read_text(encoding="utf-8"))
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


def read_placement(model: ModelLike, folder: Path) -> DevicePlacement:
    """The number of partitions, and the nodes left to the CPU but for pairs at the borders of the model."""
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
    left = [
        (node, reason) for node, reason in reasons.items() if node not in pairs or reason not in own
    ]
    return DevicePlacement(
        partitions=len(record["subgraph_traces"]),
        left=tuple(Refusal(node, reason, find_fix(reason), code="R116") for node, reason in left),
    )


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
