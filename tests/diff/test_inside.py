"""Inner tensors: what their integers mean, which belong together, and every kernel by itself."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxq
from onnxq.engines.diff_alone import check_kernels
from onnxq.engines.diff_extract import Parts
from onnxq.engines.diff_inside import Inner, open_inner
from onnxq.engines.diff_layers import reached, rows, source
from onnxq.engines.diff_levels import Level, level_of
from onnxq.engines.diff_model import ON
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session, optimized_graph
from onnxq.sites import TensorId
from tests.diff.models import WIDTH, chain, pairs, samples
from tests.pipeline.models import EVERYTHING, images, residual


def indexed(proto: onnx.ModelProto) -> GraphIndex:
    return GraphIndex(infer_shapes(name_nodes(proto)))


def opened(float_proto: onnx.ModelProto, quantized: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Inner:
    return open_inner(GraphIndex(name_nodes(float_proto)), indexed(quantized), feeds, fused=True, threads=1)


@pytest.fixture(scope="module")
def quantized_cnn() -> onnx.ModelProto:
    return onnxq.quantize(residual(), images(), EVERYTHING, latency=False).model


def test_integers_mean_the_same_before_and_after_fusion(quantized_cnn: onnx.ModelProto) -> None:
    before, after = indexed(quantized_cnn), indexed(optimized_graph(quantized_cnn, layout=False))
    quantized = {node.outputs[0] for node in before.nodes if node.op_type == "QuantizeLinear"}
    survivors = quantized & {name for node in after.nodes for name in node.outputs}
    assert len(survivors) >= 5
    assert {after.producer(TensorId(name)).op_type for name in survivors} > {"QuantizeLinear"}  # type: ignore[union-attr]
    for name in survivors:
        assert level_of(before, name) is not None
        assert level_of(after, name) == level_of(before, name)


def test_levels_follow_what_moves_integers_and_stop_at_what_computes() -> None:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[4] x) => (float[4] y) { q = QuantizeLinear(x, s, z) r = Reshape(q, shape) t = Identity(r)"
        " d = DequantizeLinear(t, s, z) y = Relu(d) }"
    )
    arrays = {"s": np.float32(0.5), "z": np.uint8(3), "shape": np.array([4], np.int64)}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items())
    index = indexed(proto)
    assert level_of(index, "t") == level_of(index, "q") == Level(0.5, 3)
    assert level_of(index, "y") is None
    assert level_of(index, "x") is None
    np.testing.assert_array_equal(Level(0.5, 3).real(np.array([3, 5], np.uint8)), [0.0, 1.0])
    np.testing.assert_array_equal(Level(0.5, 3).real(np.array([1.25], np.float32)), [1.25])


def test_scales_per_channel_have_no_single_level() -> None:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[2,3] x) => (float[2,3] y)"
        " { q = QuantizeLinear<axis=1>(x, s, z) y = DequantizeLinear<axis=1>(q, s, z) }"
    )
    arrays = {"s": np.ones(3, np.float32), "z": np.zeros(3, np.uint8)}
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    assert level_of(indexed(proto), "q") is None


def test_an_output_quantized_last_is_the_float_models_tensor(quantized_cnn: onnx.ModelProto) -> None:
    made = {row.reference: row for row in rows(GraphIndex(name_nodes(residual())), indexed(quantized_cnn))}
    assert made["y"].node.op_type == "Gemm"
    assert made["t"].step > 0


def test_weights_computed_first_are_no_rows() -> None:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[N,4] x) => (float[N,4] y) { v = Cast<to=1>(w) u = Transpose(v) a = MatMul(x, u) y = Relu(a) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float16), "w"))
    index = indexed(proto)
    assert [row.name for row in rows(index, index)] == ["a", "y"]


def test_pairs_lead_back_to_their_source() -> None:
    index = indexed(pairs(chain()))
    assert source(index, "r/dequantized") == source(index, "r/quantized") == source(index, "r") == "r"


def test_losses_are_counted_from_the_worst_input() -> None:
    index = indexed(pairs(chain()))
    made = rows(GraphIndex(chain()), index)
    found = reached(index, made, {"a": 40.0, "r": 41.0, "s": 20.0, "y": float("-inf")})
    assert found["a"] == (60.0, 40.0)
    assert found["b"] == (41.0, 41.0)  # Not measured: as good as what it is computed from.
    assert found["s"] == (41.0, 20.0)
    assert found["y"] == (20.0, -60.0)


def test_a_part_is_a_model_that_computes_the_same() -> None:
    proto = infer_shapes(name_nodes(pairs(chain())))
    feeds = {"x": samples(3)["x"]}
    names = ["r", "r/quantized", "r/dequantized", "b", "s"]
    tapped = onnx.ModelProto()
    tapped.CopyFrom(proto)
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = Session(tapped, optimize=False, threads=1).run(feeds)
    asked: list[str] = []

    def given(wanted):  # type: ignore[no-untyped-def]
        asked.extend(wanted)
        return {name: values[name] for name in wanted}

    parts = Parts(GraphIndex(proto), given)
    inside = {"r/DequantizeLinear", "w1/DequantizeLinear", "node_b"}
    model, inputs = parts.cut_fed(inside, "b")
    onnx.checker.check_model(model)
    assert list(inputs) == ["r/quantized"]
    assert set(asked) == {"r/quantized", "b"}
    np.testing.assert_array_equal(Session(model, optimize=False, threads=1).run(inputs)["b"], values["b"])
    assert parts.list_needed(["b"], {*inside, "node_y"}) == parts.sort_names(inside)
    assert parts.list_inputs(inside) == ["r/quantized"]


def test_every_kernel_of_a_sound_model_agrees_alone(quantized_cnn: onnx.ModelProto) -> None:
    feeds = images(1, seed=3)
    found = check_kernels(opened(residual(), quantized_cnn, feeds), feeds, threads=1)
    assert found.spot is None
    assert found.kernels >= 6
    assert found.levels <= 1
    assert found.share < 0.01
    assert f"each of {found.kernels} kernels alone" in found.text()


def nearly_right() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A weight along its rows, whose scales differ by a few percent, behind an input quantized to a few levels."""
    rng = np.random.default_rng(2)
    proto = chain()
    for k, tensor in enumerate(proto.graph.initializer):
        weight = rng.uniform(-1, 1, (WIDTH, WIDTH))
        weight[np.arange(WIDTH), np.arange(WIDTH)] = 1 + 0.02 * rng.standard_normal(WIDTH)
        proto.graph.initializer[k].CopyFrom(numpy_helper.from_array(weight.astype(np.float32), tensor.name))
    made = pairs(proto, "w2")
    coarse = next(tensor for tensor in made.graph.initializer if tensor.name == "x/scale")
    coarse.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(coarse) * np.float32(32), "x/scale"))
    zero = next(tensor for tensor in made.graph.initializer if tensor.name == "x/zero_point")
    zero.CopyFrom(numpy_helper.from_array(np.asarray(128, np.uint8), "x/zero_point"))
    return proto, made


def test_a_fault_below_the_noise_of_the_network_is_found_in_its_kernel() -> None:
    proto, made = nearly_right()
    shown = onnxq.diff(proto, made, samples(), layers=True, engines=["ort"])
    assert shown.parted == ()  # Quantization itself costs more than the fault.
    found = onnxq.diff(proto, made, samples(), bisect=True, engines=["ort"])
    (part,) = found.parted
    assert (part.run, part.tensor) == (ON, "y")
    (piece,) = found.bisections
    assert set(piece.nodes) == {"s/DequantizeLinear", "w2/DequantizeLinear", "node_y"}
