"""Inner tensors, engine by engine."""

import math

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.backends.engine import SessionRunner
from onnxq.data import load_data
from onnxq.engines.diff.compare import compare_models
from onnxq.engines.diff.layers import compare_layers, find_losses, find_source, group_by_size, match_tensors, open_inner
from onnxq.engines.diff.measure import Level, find_level
from onnxq.engines.diff.model import OFF, ON
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.progress import silent
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
    # As text, since NaN equals itself in dataclasses only before Python 3.13.
    assert repr(alone.outputs) == repr(inside.outputs)
    read = next(error for error in by_name(inside)["y"].engines if error.run == ON)
    assert read.sqnr_db == pytest.approx(inside.outputs[0].engines[0].sqnr_db)


@pytest.mark.parametrize("memory_limit", [1, 20_000, 10**9])
def test_memory_bounds_what_is_held_and_not_what_is_found(memory_limit: int) -> None:
    whole = diff(CHAIN, PAIRS, samples(), layers=True)
    within = diff(CHAIN, PAIRS, samples(), layers=True, memory_limit=memory_limit)
    assert repr(within.layers) == repr(whole.layers)


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
    found = compare_layers(inner, data, [other], threads=1, memory_limit=2**30, progress=silent)
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


# ---- Float, quantized without and with optimizations: what agrees, what does not, and the smallest piece of it.


def test_a_sound_model_agrees_within_rounding() -> None:
    found = diff(CHAIN, PAIRS, samples(), layers=True, bisect=True)
    assert [run.name for run in found.runs] == ["float", OFF, ON]
    assert all(run.samples == 12 for run in found.runs)
    (y,) = found.outputs
    assert [error.run for error in y.accuracy] == [OFF, ON]
    assert all(25 < error.sqnr_db < 45 for error in y.accuracy)
    assert [error.run for error in y.engines] == [ON]
    assert y.engines[0].sqnr_db > 100
    assert (found.divergences, found.bisections, found.skipped) == ((), (), ())
    assert found.holds


def test_samples_are_streamed() -> None:
    """Sums do not care whether samples come one by one, and none but the wanted ones is recorded."""
    data = load_data(samples(12), GraphIndex(CHAIN).inputs)
    result = compare_models(CHAIN, PAIRS, data, load_config(overrides={"diff.engines": ["ort"]}), keep=3)
    assert len(result.recorder.inputs) == 3
    assert {len(kept) for kept in result.recorder.outputs.values()} == {3}
    whole = Session(PAIRS, threads=1).run(samples(12))["y"]
    reference = Session(CHAIN, optimize=False, threads=1).run(samples(12))["y"]
    noise = np.square(whole.astype(np.float64) - reference).sum()
    expected = 10 * math.log10(np.square(reference.astype(np.float64)).sum() / noise)
    assert result.difference.outputs[0].accuracy[1].sqnr_db == pytest.approx(expected, abs=1e-3)


def test_a_model_is_itself() -> None:
    found = diff(CHAIN, CHAIN, samples(), layers=True, min_sqnr=100)
    assert found.outputs[0].accuracy[0].sqnr_db == math.inf
    assert found.holds


def test_samples_can_be_fewer_and_made_up_ones_are_told() -> None:
    found = diff(CHAIN, PAIRS, samples(), samples=5)
    assert (found.samples, found.runs[0].samples, found.synthetic) == (5, 5, False)
    with pytest.raises(AttributeError):
        found.samples = 3  # type: ignore[misc]
    made_up = diff(PAIRS, CHAIN)
    assert made_up.notes == ("the first model is quantized and the second is not: float comes first",)
    assert made_up.synthetic
    assert made_up.samples >= 1


def test_what_onnxq_quantizes_agrees() -> None:
    found = diff(residual(), quantized_cnn(), images(4, seed=7), layers=True, bisect=True)
    assert found.divergences == ()
    layers = by_name(found)
    assert {"a", "r", "t", "y"} <= set(layers)
    assert layers["y"].at == ""
    assert all(sqnr(layer, OFF) > 15 for layer in layers.values())
    inner = [error.levels for layer in found.layers for error in layer.engines if not math.isnan(error.levels)]
    assert inner
    assert max(inner) <= 3


def test_an_engine_that_cannot_run_the_model_is_told_and_the_rest_is_done() -> None:
    """With weights that are not square ORT's fused product notices the wrong axis and fails."""
    body = """(float[N,8] x) => (float[N,4] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        v = DequantizeLinear<axis=0>(w, ws) y = MatMul(d, v) }"""
    weight, scales = np.arange(32, dtype=np.int8).reshape(8, 4), np.linspace(0.01, 0.1, 8, dtype=np.float32)
    proto = graph(body, s=np.float32(0.05), z=np.uint8(128), ws=scales, w=weight)
    float_proto = graph("(float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }", w=weight * scales[:, None])
    data = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    found = diff(float_proto, proto, data, layers=True, bisect=True)
    assert [run.name for run in found.runs] == ["float", OFF]
    (refusal,) = found.skipped
    assert refusal.subject == ON
    assert "MatMulIntegerToFloat" in refusal.reason
    assert found.missing == (ON,)
    assert not found.holds
    assert found.outputs[0].accuracy[0].sqnr_db > 20
    (piece,) = found.bisections
    assert piece.failure
    assert set(piece.ops) <= {"QuantizeLinear", "DequantizeLinear", "MatMul"}
    assert "y/MatMul" in piece.nodes


def test_a_quantized_model_that_runs_nowhere_is_an_error() -> None:
    broken = pairs(CHAIN)
    broken.graph.node[-1].op_type = "MatMulX"
    with pytest.raises(ModelError, match="MatMulX"):
        diff(CHAIN, broken, samples())


@pytest.mark.parametrize(("x", "y", "message"), [("z", "y", "inputs"), ("x", "z", "outputs")])
def test_models_that_do_not_belong_together(x: str, y: str, message: str) -> None:
    other = graph(f"(float[N,32] {x}) => (float[N,32] {y}) {{ {y} = Relu({x}) }}")
    with pytest.raises(ModelError, match=rf"{message}.*\[Q114\]"):
        diff(CHAIN, other, samples())


def test_a_model_made_for_tensorrt_need_not_run_fused_in_ort() -> None:
    """ORT 1.31 takes FP8 pairs as they are, and makes of them integer kernels that do not exist."""
    result = onnxq.quantize(residual(), images(), "trt-fp8", overrides={"latency": False})
    found = onnxq.diff(residual(), result.model, images(2, seed=7), overrides={"layers": True})
    assert OFF in [run.name for run in found.runs]
    assert sqnr(by_name(found)["y"], OFF) > 15
    if ON in [one.subject for one in found.skipped]:
        assert ON not in found.missing
        assert diff(residual(), result.model, images(2, seed=7)).missing == (ON,)


def test_padding_does_not_count() -> None:
    """It outweighed the text: MiniLM's file of 24 dB had 10 dB, unlike what `quantize` said of it."""
    head = "(float[N,S,4] x, int64[N,S] attention_mask) => (float[N,S,4] y) { u = Unsqueeze(attention_mask, last) "
    constants = {"last": np.array([2]), "zero": np.zeros(1, np.float32), "far": np.full(1, 5, np.float32)}
    plain, other = (
        graph(head + body, 17, **constants)
        for body in (
            "m = Cast <to=1> (u) z = Mul(m, zero) h = Add(x, z) y = Identity(h) }",
            "m = Cast <to=9> (u) k = Mul(x, far) h = Where(m, x, k) y = Identity(h) }",
        )
    )
    mask = np.ones((3, 6), np.int64)
    mask[:, 4:] = 0
    data = {"x": np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32), "attention_mask": mask}
    found = diff(plain, other, data, layers=True)
    assert [error.sqnr_db for error in found.outputs[0].accuracy] == [math.inf, math.inf]
    assert all(error.sqnr_db == math.inf for layer in found.layers for error in layer.accuracy)
    whole = diff(plain, other, data | {"attention_mask": np.where(mask, 2, 0)})
    assert whole.outputs[0].accuracy[0].sqnr_db < 0
