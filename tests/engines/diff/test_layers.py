"""Inner tensors, engine by engine."""

import math

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends.engine import SessionRunner
from onnxq.data import load_data
from onnxq.engines.diff.layers import compare_layers, find_losses, find_source, group_by_size, match_tensors, open_inner
from onnxq.engines.diff.measure import Level, find_level
from onnxq.engines.diff.model import OFF, ON
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session, optimize_graph, tap_tensors
from onnxq.sites import TensorId
from tests.engines.diff.models import CHAIN, PAIRS, WIDTH, by_name, diff, indexed, pairs, quantized_cnn, samples, sqnr
from tests.engines.kit import graph
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


# ---- The real values of integers in a file, and in the graph that ORT makes of it.


def test_integers_mean_the_same_before_and_after_fusion() -> None:
    before, after = indexed(quantized_cnn()), indexed(optimize_graph(quantized_cnn(), layout=False))
    quantized = {node.outputs[0] for node in before.nodes if node.op_type == "QuantizeLinear"}
    survivors = quantized & {name for node in after.nodes for name in node.outputs}
    assert len(survivors) >= 5
    assert {after.find_producer(TensorId(name)).op_type for name in survivors} > {"QuantizeLinear"}  # type: ignore[union-attr]
    for name in survivors:
        assert find_level(before, name) is not None
        assert find_level(after, name) == find_level(before, name)


def test_levels_follow_what_moves_integers_and_stop_at_what_computes() -> None:
    body = """(float[4] x) => (float[4] y) { q = QuantizeLinear(x, s, z) r = Reshape(q, shape) t = Identity(r)
        d = DequantizeLinear(t, s, z) y = Relu(d) }"""
    index = indexed(graph(body, s=np.float32(0.5), z=np.uint8(3), shape=np.array([4])))
    assert find_level(index, "t") == find_level(index, "q") == Level(0.5, 3)
    assert find_level(index, "y") is None
    assert find_level(index, "x") is None
    np.testing.assert_array_equal(Level(0.5, 3).to_real(np.array([3, 5], np.uint8)), [0.0, 1.0])
    np.testing.assert_array_equal(Level(0.5, 3).to_real(np.array([1.25], np.float32)), [1.25])
    # Scales of channels have no single level.
    body = "(float[2,3] x) => (float[2,3] y) { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"
    assert find_level(indexed(graph(body, s=np.ones(3, np.float32), z=np.zeros(3, np.uint8))), "q") is None


# ---- Tensors of a quantized model and those of the float one that they stand for.


def test_an_output_quantized_last_is_the_float_models_tensor() -> None:
    made = {row.reference: row for row in match_tensors(GraphIndex(name_nodes(residual())), indexed(quantized_cnn()))}
    assert made["y"].node.op_type == "Gemm"
    assert made["t"].step > 0


def test_weights_computed_first_are_no_rows() -> None:
    body = "(float[N,4] x) => (float[N,4] y) { v = Cast<to=1>(w) u = Transpose(v) a = MatMul(x, u) y = Relu(a) }"
    index = indexed(graph(body, w=np.ones((4, 4), np.float16)))
    assert [row.name for row in match_tensors(index, index)] == ["a", "y"]


def test_a_relu_that_a_tool_took_out_is_compared_behind_the_quantizer() -> None:
    """As onnxruntime.quantization does where the range of the pair begins at 0."""
    body = """(float[N,4] x) => (float[N,4] y) <float s = {0.1}, uint8 z = {0}> {
        h = Neg(x) q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) y = Abs(d) }"""
    plain = graph("(float[N,4] x) => (float[N,4] y) { g = Neg(x) h = Relu(g) y = Abs(h) }")
    rows = {row.reference: row for row in match_tensors(indexed(plain), indexed(graph(body)))}
    assert [one.tensor for one in rows["h"].counterparts] == ["q"]
    assert [one.tensor for one in rows["y"].counterparts] == ["y"]


def test_pairs_lead_back_to_their_source() -> None:
    index = indexed(PAIRS)
    assert find_source(index, "r/dequantized") == find_source(index, "r/quantized") == find_source(index, "r") == "r"


def test_losses_are_counted_from_the_worst_input() -> None:
    index = indexed(PAIRS)
    found = find_losses(
        index, match_tensors(GraphIndex(CHAIN), index), {"a": 40.0, "r": 41.0, "s": 20.0, "y": float("-inf")}
    )
    assert found["a"] == (60.0, 40.0)
    assert found["b"] == (41.0, 41.0)  # Not measured: as good as what it is computed from.
    assert found["s"] == (41.0, 20.0)
    assert found["y"] == (20.0, -60.0)
