"""Reading models with the attribute `bits`, which onnx.checker refuses: it waits in metadata during the check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto

from onnxq.errors import ModelError
from onnxq.graph import Model, load_model
from onnxq.graph.external import load_external
from onnxq.graph.scopes import all_graphs
from onnxq.plan.names import DEQUANTIZE, QUANTIZE

ATTRIBUTE = "bits"
_WAITING = "onnxq.waiting-attribute-bits"


def read_model(source: str | Path | ModelProto) -> Model:
    """As load_model, but Q/DQ nodes may carry an integer attribute `bits`; it is still there afterwards."""
    try:
        return load_model(source)
    except ModelError:
        proto = _raw(source)
        if proto is None or not _put_aside(proto):
            raise
    size, external = proto.ByteSize(), False
    files: tuple[Path, ...] = ()
    if not isinstance(source, ModelProto):
        read = load_external(proto, Path(source))
        more, files = sum(read.values()), (Path(source), *read)
        size, external = Path(source).stat().st_size + more, more > 0
    model = load_model(proto)
    _bring_back(model.proto)
    path = None if isinstance(source, ModelProto) else Path(source)
    return replace(model, path=path, size_bytes=size, external=external, files=files)


def _raw(source: str | Path | ModelProto) -> ModelProto | None:
    proto = ModelProto()
    if isinstance(source, ModelProto):
        proto.CopyFrom(source)
        return proto
    try:
        proto.ParseFromString(Path(source).read_bytes())
    except Exception:  # also protobuf's DecodeError, whose package has no types; load_model has told what is wrong
        return None
    return proto


def pair_nodes(proto: ModelProto) -> list[NodeProto]:
    """Every quantize and dequantize node, functions and bodies included."""
    return [node for _, graph in all_graphs(proto) for node in graph.node if node.op_type in (QUANTIZE, DEQUANTIZE)]


def set_attribute(node: NodeProto, bits: int) -> None:
    """Write the attribute `bits` in place of the one there may be."""
    drop_attribute(node)
    node.attribute.append(onnx.helper.make_attribute(ATTRIBUTE, bits))


def drop_attribute(node: NodeProto) -> int | None:
    """Take the attribute `bits` away; its value, None when there was none."""
    for position, attribute in enumerate(node.attribute):
        if attribute.name == ATTRIBUTE:
            value = int(attribute.i)
            del node.attribute[position]
            return value
    return None


def _put_aside(proto: ModelProto) -> bool:
    found = False
    for node in pair_nodes(proto):
        value = drop_attribute(node)
        if value is not None:
            node.metadata_props.add(key=_WAITING, value=str(value))
            found = True
    return found


def _bring_back(proto: ModelProto) -> None:
    for node in pair_nodes(proto):
        for position, entry in enumerate(node.metadata_props):
            if entry.key == _WAITING:
                set_attribute(node, int(entry.value))
                del node.metadata_props[position]
                break
