"""Float, quantized without and with optimizations: what agrees, what does not, and the smallest piece that shows it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

import onnxq
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.engines.diff.compare import Wish, compare
from onnxq.engines.diff.layers import grouped, open_inner, read_inside
from onnxq.engines.diff.matching import rows
from onnxq.engines.diff.model import OFF, ON, LayerDiff
from onnxq.engines.diff.results import active, ort_runner
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session, tap
from onnxq.sites import TensorId
from tests.engines.diff.models import WIDTH, chain, pairs, samples
from tests.pipeline.models import EVERYTHING, images, residual


def by_name(found: onnxq.Difference) -> dict[str, LayerDiff]:
    return {layer.name: layer for layer in found.layers}


def sqnr(layer: LayerDiff, run: str) -> float:
    return next((error.sqnr_db for error in layer.accuracy if error.run == run), math.nan)


@pytest.fixture(scope="module")
def float_model() -> onnx.ModelProto:
    return chain()


def test_a_sound_model_agrees_within_rounding(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, pairs(float_model), samples(), layers=True, bisect=True, engines=["ort"])
    assert [run.name for run in found.runs] == ["float", OFF, ON]
    assert all(run.samples == 12 for run in found.runs)
    (y,) = found.outputs
    assert [error.run for error in y.accuracy] == [OFF, ON]
    assert all(25 < error.sqnr_db < 45 for error in y.accuracy)
    assert [error.run for error in y.engines] == [ON]
    assert y.engines[0].sqnr_db > 100
    assert (found.parted, found.bisections, found.skipped) == ((), (), ())
    assert found.holds


# From 1.32 on, kernels that write integers leave scales along rows alone; the one that writes float still does not.
READS_ROWS = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)


# With int8 and zero point 0 a ReLU between product and quantizer keeps ORT from fusing them: only the last one is.
@pytest.mark.parametrize(
    ("wrong", "signed", "node", "parted"),
    [
        ("w0", False, "node_a", "r"),
        ("w1", False, "node_b", "s"),
        ("w2", False, "node_y", "y"),
        ("w2", True, "node_y", "y"),
    ],
)
def test_a_weight_quantized_along_its_rows_is_found(
    float_model: onnx.ModelProto, wrong: str, signed: bool, node: str, parted: str
) -> None:
    """Legal by ONNX, and right without optimizations; ORT's fused products read the scales as those of columns."""
    found = onnxq.diff(float_model, pairs(float_model, wrong, signed=signed), samples(), bisect=True, engines=["ort"])
    (y,) = found.outputs
    off, on = (error.sqnr_db for error in y.accuracy)
    assert off > 25
    if parted != "y" and READS_ROWS:
        assert on > 25
        assert not found.parted
        return
    assert on < 5
    (part,) = found.parted
    assert (part.run, part.against, part.tensor) == (ON, OFF, parted)
    (piece,) = found.bisections
    assert node in piece.nodes
    assert f"{wrong}/DequantizeLinear" in piece.nodes
    assert set(piece.ops) <= {"QuantizeLinear", "DequantizeLinear", "MatMul", "Relu"}
    assert piece.ops.count("MatMul") == 1
    assert len(piece.nodes) <= 5
    assert piece.sqnr_db < 5


def test_nothing_can_be_left_out_of_the_piece(float_model: onnx.ModelProto, tmp_path) -> None:  # type: ignore[no-untyped-def]
    broken = pairs(float_model, "w2")
    found = onnxq.diff(float_model, broken, samples(), bisect=True, engines=["ort"], save=tmp_path / "out")
    (piece,) = found.bisections
    model = onnx.load(piece.path)
    onnx.checker.check_model(model)
    assert [node.name for node in model.graph.node] == list(piece.nodes)
    assert [value.name for value in model.graph.input] == list(piece.inputs)
    assert [value.name for value in model.graph.output] == [piece.output]
    (feeds,) = load_data(str(tmp_path / "out" / "bisect-ort-on.inputs.json"), GraphIndex(model).inputs).samples()
    off, on = (Session(model, optimize=optimize, threads=1).run(feeds)[piece.output] for optimize in (False, True))
    noise = np.square(off - on, dtype=np.float64).sum() / np.square(off, dtype=np.float64).sum()
    assert -10 * np.log10(noise) == pytest.approx(piece.sqnr_db, abs=0.1)


def test_rows_follow_the_network_and_fused_tensors_are_read_at_their_quantizer(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, pairs(float_model), samples(), layers=True, engines=["ort"])
    assert [layer.name for layer in found.layers] == ["a", "r", "b", "s", "y"]
    layers = by_name(found)
    # The product and its ReLU became one kernel, whose result is the quantizer's.
    assert math.isnan(sqnr(layers["a"], ON))
    assert layers["r"].at == "r/quantized"
    assert sqnr(layers["r"], ON) == pytest.approx(sqnr(layers["r"], OFF), abs=0.1)
    assert layers["y"].at == ""
    assert layers["s"].drop_db == pytest.approx(sqnr(layers["b"], OFF) - sqnr(layers["s"], OFF))
    assert found.worst[0] == "a"


def test_reading_inside_changes_no_output(float_model: onnx.ModelProto) -> None:
    broken = pairs(float_model, "w1")
    alone = onnxq.diff(float_model, broken, samples(), engines=["ort"])
    inside = onnxq.diff(float_model, broken, samples(), layers=True, bisect=True, engines=["ort"])
    assert alone.outputs == inside.outputs
    read = next(error for error in by_name(inside)["y"].engines if error.run == ON)
    assert read.sqnr_db == pytest.approx(inside.outputs[0].engines[0].sqnr_db)


@pytest.mark.parametrize("memory_limit", [1, 20_000, 10**9])
def test_memory_bounds_what_is_held_and_not_what_is_found(float_model: onnx.ModelProto, memory_limit: int) -> None:
    quantized = pairs(float_model)
    whole = onnxq.diff(float_model, quantized, samples(), layers=True, engines=["ort"])
    parted = onnxq.diff(float_model, quantized, samples(), layers=True, engines=["ort"], memory_limit=memory_limit)
    assert parted.layers == whole.layers


def test_groups_keep_to_the_limit(float_model: onnx.ModelProto) -> None:
    index = GraphIndex(infer_shapes(name_nodes(pairs(float_model))))
    made = rows(GraphIndex(float_model), index)
    feeds = {"x": samples(1)["x"]}
    row = 4 * WIDTH
    assert [[one.name for one in group] for group in grouped(index.proto, made, feeds, 3 * row)] == [
        ["a", "r"], ["b", "s"], ["y"]
    ]  # fmt: skip


def test_samples_are_streamed(float_model: onnx.ModelProto) -> None:
    """Sums do not care whether samples come one by one, and none but the wanted ones is recorded."""
    named = GraphIndex(float_model)
    quantized = pairs(float_model)
    data = load_data(samples(12), named.inputs)
    outcome = compare(float_model, quantized, data, Wish(engines=("ort",), keep=3))
    assert len(outcome.recorder.inputs) == 3
    assert {len(kept) for kept in outcome.recorder.outputs.values()} == {3}
    whole = Session(quantized, threads=1).run(samples(12))["y"]
    reference = Session(float_model, optimize=False, threads=1).run(samples(12))["y"]
    noise = np.square(whole.astype(np.float64) - reference).sum()
    expected = 10 * math.log10(np.square(reference.astype(np.float64)).sum() / noise)
    assert outcome.difference.outputs[0].accuracy[1].sqnr_db == pytest.approx(expected, abs=1e-3)


def test_another_engine_that_gives_inner_tensors_is_a_column(float_model: onnx.ModelProto) -> None:
    """What TensorRT's runner gives with its outputs, given here by a session that taps them."""
    quantized = infer_shapes(name_nodes(pairs(float_model)))
    inner = open_inner(GraphIndex(float_model), GraphIndex(quantized), {"x": samples(1)["x"]}, fused=True, threads=1)
    tapped = tap(quantized, [TensorId("r/quantized"), TensorId("b")])
    other = ort_runner("other", Session(tapped.proto, optimize=False, threads=1))
    data = load_data(samples(4), inner.float_index.inputs)
    with active([other]):
        found = read_inside(inner, data.samples, data[0], others=[other], threads=1)
    layers = {layer.name: layer for layer in found.layers}
    for name in ("r", "b", "y"):
        error = next(one for one in layers[name].engines if one.run == "other")
        assert error.sqnr_db == math.inf
    assert not any(one.run == "other" for one in layers["s"].engines)
    assert found.spots == ()


def test_a_model_is_itself(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, float_model, samples(), layers=True, engines=["ort"], min_sqnr=100)
    assert found.outputs[0].accuracy[0].sqnr_db == math.inf
    assert found.holds


def test_what_onnxq_quantizes_agrees() -> None:
    result = onnxq.quantize(residual(), images(), EVERYTHING, latency=False)
    found = onnxq.diff(residual(), result.model, images(4, seed=7), layers=True, bisect=True, engines=["ort"])
    assert found.parted == ()
    layers = by_name(found)
    assert {"a", "r", "t", "y"} <= set(layers)
    assert layers["y"].at == ""
    assert all(sqnr(layer, OFF) > 15 for layer in layers.values())
    inner = [error.levels for layer in found.layers for error in layer.engines if not math.isnan(error.levels)]
    assert inner
    assert max(inner) <= 3


def test_narrow_ranges_are_read_through_their_clip() -> None:
    config = EVERYTHING.model_copy(update={"activations": EVERYTHING.activations.model_copy(update={"bits": 6})})
    result = onnxq.quantize(residual(), images(), config, latency=False)
    found = onnxq.diff(residual(), result.model, images(4, seed=7), layers=True, engines=["ort"])
    names = [layer.name for layer in found.layers]
    assert not [name for name in names if name.endswith("/clipped")]
    assert sqnr(by_name(found)["t"], OFF) > 10


def test_an_engine_that_cannot_run_the_model_is_told_and_the_rest_is_done() -> None:
    """With weights that are not square ORT's fused product notices the wrong axis and fails."""
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[N,8] x) => (float[N,4] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
        " v = DequantizeLinear<axis=0>(w, ws) y = MatMul(d, v) }"
    )
    arrays = {
        "s": np.float32(0.05), "z": np.uint8(128), "ws": np.linspace(0.01, 0.1, 8, dtype=np.float32),
        "w": np.arange(32, dtype=np.int8).reshape(8, 4),
    }  # fmt: skip
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items())
    float_proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\ng (float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }'
    )
    weight = arrays["w"].astype(np.float32) * arrays["ws"][:, None]
    float_proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    data = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    found = onnxq.diff(float_proto, proto, data, layers=True, bisect=True, engines=["ort"])
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


def test_a_quantized_model_that_runs_nowhere_is_an_error(float_model: onnx.ModelProto) -> None:
    broken = pairs(float_model)
    broken.graph.node[-1].op_type = "MatMulX"
    with pytest.raises(ModelError, match="MatMulX"):
        onnxq.diff(float_model, broken, samples(), engines=["ort"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.input[0].__setattr__("name", "z"), "inputs"),
        (lambda graph: graph.output[0].__setattr__("name", "z"), "outputs"),
    ],
)
def test_models_that_do_not_belong_together(float_model: onnx.ModelProto, change, message: str) -> None:  # type: ignore[no-untyped-def]
    other = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\ng (float[N,32] x) => (float[N,32] y) { y = Relu(x) }'
    )
    change(other.graph)
    other.graph.node[0].input[0], other.graph.node[0].output[0] = other.graph.input[0].name, other.graph.output[0].name
    with pytest.raises(ModelError, match=message):
        onnxq.diff(float_model, other, samples(), engines=["ort"])


def test_branches_are_single_units_of_a_piece() -> None:
    """The product that parts lies behind an If; the If is taken or left as one node."""
    float_proto = chain()
    broken = pairs(float_proto, "w2")
    for proto in (float_proto, broken):
        value = helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, None)
        bodies = {
            name: helper.make_graph([helper.make_node(op, ["r"], ["h"], name=f"{name}_node")], name, [], [value])
            for name, op in (("then_branch", "Relu"), ("else_branch", "Neg"))
        }
        at = next(k for k, node in enumerate(proto.graph.node) if node.output[0] == "r") + 1
        taken = helper.make_node("If", ["c"], ["h"], name="choice", **bodies)
        nodes = list(proto.graph.node)
        for node in nodes[at:]:
            node.input[:] = ["h" if name == "r" else name for name in node.input]
        del proto.graph.node[:]
        proto.graph.node.extend([*nodes[:at], taken, *nodes[at:]])
        proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    found = onnxq.diff(float_proto, broken, samples(), layers=True, bisect=True, engines=["ort"])
    assert "node_y" in found.bisections[0].nodes
    assert "h" in by_name(found)


def test_samples_can_be_fewer(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, pairs(float_model), samples(), samples=5, engines=["ort"])
    assert (found.samples, found.runs[0].samples) == (5, 5)


def test_without_data_it_says_so(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, pairs(float_model), engines=["ort"])
    assert found.synthetic
    assert found.samples >= 1


def test_the_account_is_frozen(float_model: onnx.ModelProto) -> None:
    data = load_data(samples(2), GraphIndex(float_model).inputs, DataConfig())
    found = compare(float_model, pairs(float_model), data, Wish(engines=("ort",))).difference
    with pytest.raises(AttributeError):
        found.samples = 3  # type: ignore[misc]
    assert replace(found, samples=3).samples == 3


def test_a_model_made_for_tensorrt_need_not_run_fused_in_ort() -> None:
    """ORT 1.31 takes FP8 pairs as they are, and makes of them integer kernels that do not exist."""
    result = onnxq.quantize(residual(), images(), "trt-fp8", latency=False)
    found = onnxq.diff(residual(), result.model, images(2, seed=7), layers=True)
    assert OFF in [run.name for run in found.runs]
    assert sqnr(by_name(found)["y"], OFF) > 15
    if ON in [one.subject for one in found.skipped]:
        assert ON not in found.missing
        asked = onnxq.diff(residual(), result.model, images(2, seed=7), engines=["ort"])
        assert asked.missing == (ON,)
