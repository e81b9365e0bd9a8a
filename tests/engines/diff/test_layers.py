"""Inner tensors, engine by engine."""

import math

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends.engine import SessionRunner
from onnxq.data import load_data
from onnxq.engines.diff.layers import compare_layers, group_by_size, match_tensors, open_inner
from onnxq.engines.diff.model import OFF, ON
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.engines.diff.models import CHAIN, PAIRS, WIDTH, by_name, diff, indexed, pairs, samples, sqnr
from tests.pipeline.models import EVERYTHING, images, residual


def test_rows_follow_the_network_and_fused_tensors_are_read_at_their_quantizer() -> None:
    found = diff(CHAIN, PAIRS, samples(), layers=True)
    assert [layer.name for layer in found.layers] == ["a", "r", "b", "s", "y"]
    layers = by_name(found)
    # The product and its ReLU became one kernel, whose result is the quantizer's.
    assert math.isnan(sqnr(layers["a"], ON))
    assert layers["r"].at == "r/quantized"
    assert sqnr(layers["r"], ON) == pytest.approx(sqnr(layers["r"], OFF), abs=0.1)
    assert layers["y"].at == ""
    assert layers["s"].drop_db == pytest.approx(sqnr(layers["b"], OFF) - sqnr(layers["s"], OFF))
    assert found.worst[0] == "a"


def test_sequences_and_maps_are_no_layers() -> None:
    """They have no shape that could be asked for, and no array to compare."""
    models = []
    for proto in (CHAIN, PAIRS):
        other = onnx.ModelProto()
        other.CopyFrom(proto)
        nodes = [("SequenceConstruct", ["r"], "q"), ("SequenceAt", ["q", "first"], "t"), ("ZipMap", ["t"], "p")]
        for op_type, inputs, name in nodes:
            other.graph.node.append(onnx.helper.make_node(op_type, inputs, [name], name=f"{name}/{op_type}"))
        other.graph.node[-1].domain = "ai.onnx.ml"
        other.graph.node[-1].attribute.append(onnx.helper.make_attribute("classlabels_int64s", range(WIDTH)))
        other.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "first"))
        other.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 1))
        entry = onnx.helper.make_map_type_proto(
            onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
        )
        other.graph.output.append(onnx.helper.make_value_info("p", onnx.helper.make_sequence_type_proto(entry)))
        models.append(other)
    found = diff(*models, samples(), layers=True)
    assert [layer.name for layer in found.layers] == ["a", "r", "b", "s", "y", "t"]


def test_reading_inside_changes_no_output() -> None:
    broken = pairs(CHAIN, "w1")
    alone = diff(CHAIN, broken, samples())
    inside = diff(CHAIN, broken, samples(), layers=True, bisect=True)
    assert alone.outputs == inside.outputs
    read = next(error for error in by_name(inside)["y"].engines if error.run == ON)
    assert read.sqnr_db == pytest.approx(inside.outputs[0].engines[0].sqnr_db)


@pytest.mark.parametrize("memory_limit", [1, 20_000, 10**9])
def test_memory_bounds_what_is_held_and_not_what_is_found(memory_limit: int) -> None:
    whole = diff(CHAIN, PAIRS, samples(), layers=True)
    small = diff(CHAIN, PAIRS, samples(), layers=True, memory_limit=memory_limit)
    assert small.layers == whole.layers


def test_groups_keep_to_the_limit() -> None:
    index = indexed(PAIRS)
    made = match_tensors(GraphIndex(CHAIN), index)
    feeds = {"x": samples(1)["x"]}
    row = 4 * WIDTH
    assert [[one.name for one in group] for group in group_by_size(index.proto, made, feeds, 3 * row)] == [
        ["a", "r"], ["b", "s"], ["y"]
    ]  # fmt: skip


def test_another_engine_that_gives_inner_tensors_is_a_column() -> None:
    """The results of TensorRT's runner, given here by a session that taps them."""
    quantized = infer_shapes(name_nodes(PAIRS))
    inner = open_inner(GraphIndex(CHAIN), GraphIndex(quantized), {"x": samples(1)["x"]}, fused=True, threads=1)
    tapped = tap_tensors(quantized, [TensorId("r/quantized"), TensorId("b")])
    other = SessionRunner("other", Session(tapped.proto, optimize=False, threads=1))
    data = load_data(samples(4), inner.float_index.inputs)
    found = compare_layers(inner, data.samples, data[0], others=[other], threads=1)
    layers = {layer.name: layer for layer in found.layers}
    for name in ("r", "b", "y"):
        error = next(one for one in layers[name].engines if one.run == "other")
        assert error.sqnr_db == math.inf
    assert not any(one.run == "other" for one in layers["s"].engines)
    assert found.points == ()


def test_narrow_ranges_are_read_through_their_clip() -> None:
    config = EVERYTHING.model_copy(update={"activations": EVERYTHING.activations.model_copy(update={"bits": 6})})
    result = onnxq.quantize(residual(), images(), config, overrides={"latency": False})
    found = diff(residual(), result.model, images(4, seed=7), layers=True)
    names = [layer.name for layer in found.layers]
    assert not [name for name in names if name.endswith("/clipped")]
    assert sqnr(by_name(found)["t"], OFF) > 10
