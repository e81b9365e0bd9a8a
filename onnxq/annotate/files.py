"""Models with the attribute `bits`, which onnx.checker refuses: it is moved to metadata for the check, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto

from onnxq.errors import ModelError
from onnxq.graph import Model, load_model
from onnxq.graph.scopes import walk_all_graphs
from onnxq.graph.stored import load_external
from onnxq.plan.names import DEQUANTIZE, QUANTIZE

# Sparsebit's attribute on Q and DQ nodes.
ATTRIBUTE = "bits"
# Key of the node metadata that holds its value during the check.
_WAITING = "onnxq.waiting-attribute-bits"


def read_model(source: str | Path | ModelProto) -> Model:
    """The model as `load_model` reads it; its Q/DQ nodes may have an integer attribute `bits`, which they keep.

    Raises ModelError as `load_model` does.
    """
    # Most models have no such attribute, so the ordinary way is tried first.
    try:
        return load_model(source)
    except ModelError:
        proto = _parse_unchecked(source)
        if proto is None or not _hide_attributes(proto):
            raise
    size, external = proto.ByteSize(), False
    files: tuple[Path, ...] = ()
    if not isinstance(source, ModelProto):
        read = load_external(proto, Path(source))
        more, files = sum(read.values()), (Path(source), *read)
        size, external = Path(source).stat().st_size + more, more > 0
    model = load_model(proto)
    _restore_attributes(model.proto)
    path = None if isinstance(source, ModelProto) else Path(source)
    return replace(model, path=path, size_bytes=size, external=external, files=files)


def _parse_unchecked(source: str | Path | ModelProto) -> ModelProto | None:
    proto = ModelProto()
    if isinstance(source, ModelProto):
        proto.CopyFrom(source)
        return proto
    try:
        proto.ParseFromString(Path(source).read_bytes())
    except Exception:
        # Also protobuf's DecodeError, whose package has no types. load_model has raised an error that says more.
        return None
    return proto


def list_pair_nodes(proto: ModelProto) -> list[NodeProto]:
    """Every QuantizeLinear and DequantizeLinear node, in functions and bodies too."""
    return [
        node for _, graph in walk_all_graphs(proto) for node in graph.node if node.op_type in (QUANTIZE, DEQUANTIZE)
    ]


def set_attribute(node: NodeProto, bits: int) -> None:
    """Set the attribute `bits` of a node."""
    drop_attribute(node)
    node.attribute.append(onnx.helper.make_attribute(ATTRIBUTE, bits))


def drop_attribute(node: NodeProto) -> int | None:
    """Remove the attribute `bits`; returns its value, None without one."""
    for position, attribute in enumerate(node.attribute):
        if attribute.name == ATTRIBUTE:
            value = int(attribute.i)
            del node.attribute[position]
            return value
    return None


def _hide_attributes(proto: ModelProto) -> bool:
    """Move every attribute `bits` to metadata; True when there was one."""
    found = False
    for node in list_pair_nodes(proto):
        value = drop_attribute(node)
        if value is not None:
            node.metadata_props.add(key=_WAITING, value=str(value))
            found = True
    return found


def _restore_attributes(proto: ModelProto) -> None:
    for node in list_pair_nodes(proto):
        for position, entry in enumerate(node.metadata_props):
            if entry.key == _WAITING:
                set_attribute(node, int(entry.value))
                del node.metadata_props[position]
                break
