"""The kernels of a TensorRT engine, read from the builder's "Layers:" message or the inspector's JSON."""

import json
import re
from collections.abc import Mapping

from onnxq.backends.engine import Kernel, Kernels, Tensor, Tensors
from onnxq.sites import JsonObject, Names, drop_repeats

# Files in which a build lists its kernels, as its log or its inspector does.
LAYERS = "layers.txt"
INSPECTION = "layers.json"
# How the verbose message that lists an engine's kernels begins.
HEADER = "Layers:"
_LINE = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\]"
    r"(?:, Constants: \[(?P<weights>.*?)\])?, Outputs: \[(?P<outputs>.*?)\](?=, TacticName|, StreamId|, Metadata|$)"
    r"(?:, TacticName: (?P<tactic>[^,]*))?.*?(?:, Metadata: ?(?P<metadata>.*))?$"
)
# Dynamic axes are -1.
_SIZE = re.compile(r"-?[0-9]+")
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<shape>[^\]]*)\].*?"
    r"Datatype: (?P<dtype>\w+)(?:, Format: (?P<layout>.*?))? \}"
)
# A name may hold brackets itself: the next mark or the end closes it.
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1d-\x1f\s]*(?:\[ONNX Layer: |$))")

# Generated kernels are named after their operations, four letters each: those that lay out, copy or convert data.
_GENERATED = re.compile(r"__myl_((?:[A-Z][a-z0-9]{3})+)_")
_MOVES = frozenset({"Move", "Tran", "Resh", "Cast", "Repl", "Conc", "Slic"})
# Layers of the inspector that do nothing else, and those that make streams wait for each other.
_MOVING_KINDS = (
    "reformat",
    "shuffle",
    "copy",
    "noop",
    "no_op",
    "signal",
    "wait",
    "shapehosttodevice",
)

# Types that TensorRT calls as we do, then its other words; in an older inspector they stand inside a sentence.
# The first match wins, so "float" comes after the longer words that begin with it.
_SAME = (
    "uint8",
    "int8",
    "uint4",
    "int4",
    "float8",
    "float4",
    "bfloat16",
    "float16",
    "int32",
    "int64",
    "bool",
)
_OTHER = {
    "fp8": "float8",
    "fp4": "float4",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
}
_TYPES = {**dict(zip(_SAME, _SAME, strict=True)), **_OTHER, "float": "float32"}


def find_dtype(words: str) -> str:
    """The type in TensorRT's words ("Int8", "Row major linear FP16 format"); "" when they name none."""
    low = words.lower()
    return next(
        (ours for theirs, ours in _TYPES.items() if re.search(rf"(?<![a-z]){theirs}", low)), ""
    )


def find_node_names(metadata: str) -> Names:
    """The ONNX nodes in a kernel's metadata, each once, in its order."""
    return drop_repeats(_NODE.findall(metadata))


def moves_data(name: str, kind: str) -> bool:
    """True for a kernel that lays out, copies or converts data, or waits, and computes nothing."""
    generated = _GENERATED.match(name)
    if generated is not None:
        return {generated[1][k : k + 4] for k in range(0, len(generated[1]), 4)} <= _MOVES
    return kind.lower() in _MOVING_KINDS


def read_layers_message(text: str) -> Kernels:
    """The kernels of a verbose "Layers:" message, one line each; lines of another form are left out."""
    found = (_LINE.match(line.strip()) for line in text.removeprefix(HEADER).splitlines())
    return tuple(
        Kernel(
            name=line["name"],
            kind=line["kind"],
            nodes=find_node_names(line["metadata"] or ""),
            inputs=_read_tensors(line["inputs"]),
            weights=_read_tensors(line["weights"] or ""),
            outputs=_read_tensors(line["outputs"]),
            tactic=line["tactic"] or "",
            moves=moves_data(line["name"], line["kind"]),
        )
        for line in found
        if line is not None
    )


def _read_tensors(text: str) -> Tensors:
    return tuple(
        Tensor(
            name=found["name"],
            dtype=find_dtype(found["dtype"]),
            shape=tuple(map(int, _SIZE.findall(found["shape"]))),
            layout=found["layout"] or "",
        )
        for found in _TENSOR.finditer(text)
    )


def read_inspector(text: str) -> Kernels:
    """The kernels of an engine inspector's JSON. Layers given by name only (an engine built without DETAILED) too."""
    raw = json.loads(text)
    layers = raw.get("Layers", ()) if isinstance(raw, dict) else raw
    return tuple(
        _read_layer(layer) if isinstance(layer, dict) else Kernel(name=str(layer), kind="")
        for layer in layers
    )


def _read_layer(layer: JsonObject) -> Kernel:
    name = str(layer.get("Name", ""))
    kind = str(layer.get("LayerType", ""))
    weights = [_read_tensor(entry) for entry in layer.get("Constants") or ()]
    # A convolution's weight may stand apart from the constants, with a count in place of a shape.
    weight = layer.get("Weights")
    if isinstance(weight, Mapping) and weight.get("Count"):
        dtype = find_dtype(str(weight.get("Type", "")))
        weights.append(Tensor(name="weights", dtype=dtype, shape=(int(weight["Count"]),)))
    return Kernel(
        name=name,
        kind=kind,
        nodes=find_node_names(str(layer.get("Metadata", ""))),
        inputs=tuple(map(_read_tensor, layer.get("Inputs") or ())),
        weights=tuple(weights),
        outputs=tuple(map(_read_tensor, layer.get("Outputs") or ())),
        tactic=str(layer.get("TacticName", "")),
        moves=moves_data(name, kind),
    )


def _read_tensor(entry: JsonObject) -> Tensor:
    """TensorRT 10 has "Format/Datatype"; 11 has "Format" and a type beside it, spelt Datatype or DataType."""
    values = {key.lower(): value for key, value in entry.items()}
    layout = str(values.get("format") or values.get("format/datatype") or "")
    return Tensor(
        name=str(values.get("name", "")),
        dtype=find_dtype(str(values.get("datatype") or "")) or find_dtype(layout),
        shape=tuple(map(int, values.get("dimensions") or ())),
        layout=layout,
    )
