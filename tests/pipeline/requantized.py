"""Models that hold pairs already, and what tests ask of them once they are quantized again."""

from collections import Counter
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from onnxq.graph import name_nodes
from onnxq.runtime import optimize_graph
from tests.pipeline.models import Reader, images, residual


def kernels(model: onnx.ModelProto) -> Counter[str]:
    """ORT's kernels by operator."""
    return Counter(node.op_type for node in optimize_graph(model).graph.node)


def pair_bytes(model: onnx.ModelProto) -> dict[str, tuple[bytes, ...]]:
    """Scale, zero point and stored integers of every pair's nodes, by node name."""
    held = {tensor.name: tensor.SerializeToString() for tensor in model.graph.initializer}
    return {
        node.name: tuple(held[name] for name in node.input if name in held)
        for node in model.graph.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    }


def assert_kept(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Every pair is still there with its numbers, and no tensor got a second one."""
    old, new = pair_bytes(before), pair_bytes(after)
    assert {name: new.get(name) for name in old} == old
    sources = Counter(node.input[0] for node in after.graph.node if node.op_type == "QuantizeLinear")
    assert set(sources.values()) <= {1}, sources
    made = {node.output[0] for node in after.graph.node if node.op_type == "DequantizeLinear"}
    assert not made.intersection(sources), "a pair behind a pair"


def by_onnxruntime(
    folder: Path, form: str, *, per_channel: bool = False, leave: tuple[str, ...] = ()
) -> onnx.ModelProto:
    """`residual` as onnxruntime.quantization writes it. form: QDQ or QOperator. leave: nodes that stay float."""
    onnx.save(name_nodes(residual()), folder / "float.onnx")
    quantize_static(
        str(folder / "float.onnx"), str(folder / "q.onnx"), Reader(images()["x"]), quant_format=QuantFormat[form],
        per_channel=per_channel, activation_type=QuantType.QUInt8, nodes_to_exclude=list(leave),
    )  # fmt: skip
    return onnx.load(folder / "q.onnx")
