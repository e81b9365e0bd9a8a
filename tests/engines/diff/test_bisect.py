"""The smallest piece of a network in which two engines diverge."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from onnxq.data import load_data
from onnxq.engines.diff.bisect import FedParts, check_kernels
from onnxq.engines.diff.layers import open_inner
from onnxq.engines.diff.model import OFF, ON
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.engines.diff.models import CHAIN, PAIRS, WIDTH, by_name, chain, diff, indexed, pairs, quantized_cnn, samples
from tests.graph.shape_nets import ShapeNet, shape_nets
from tests.networks import add_arrays
from tests.pipeline.models import images, residual

# From 1.32 on, kernels that write integers leave scales along rows alone; the one that writes float still does not.
READS_ROWS = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)


# With int8 and zero point 0 a ReLU between product and quantizer keeps ORT from fusing them: only the last one is.
@pytest.mark.parametrize(
    ("wrong", "signed", "node", "tensor"),
    [
        ("w0", False, "node_a", "r"),
        ("w1", False, "node_b", "s"),
        ("w2", False, "node_y", "y"),
        ("w2", True, "node_y", "y"),
    ],
)
def test_a_weight_quantized_along_its_rows_is_found(wrong: str, signed: bool, node: str, tensor: str) -> None:
    """Legal by ONNX, and right without optimizations; ORT's fused products read the scales as those of columns."""
    found = diff(CHAIN, pairs(CHAIN, wrong, signed=signed), samples(), bisect=True)
    (y,) = found.outputs
    off, on = (error.sqnr_db for error in y.accuracy)
    assert off > 25
    if tensor != "y" and READS_ROWS:
        assert on > 25
        assert not found.divergences
        return
    assert on < 5
    (part,) = found.divergences
    assert (part.run, part.against, part.tensor) == (ON, OFF, tensor)
    (piece,) = found.bisections
    assert node in piece.nodes
    assert f"{wrong}/DequantizeLinear" in piece.nodes
    assert set(piece.ops) <= {"QuantizeLinear", "DequantizeLinear", "MatMul", "Relu"}
    assert piece.ops.count("MatMul") == 1
    assert len(piece.nodes) <= 5
    assert piece.sqnr_db < 5


def test_nothing_can_be_left_out_of_the_piece(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (piece,) = diff(CHAIN, pairs(CHAIN, "w2"), samples(), bisect=True, out=tmp_path / "out").bisections
    model = onnx.load(piece.path)
    onnx.checker.check_model(model)
    assert [node.name for node in model.graph.node] == list(piece.nodes)
    assert [value.name for value in model.graph.input] == list(piece.inputs)
    assert [value.name for value in model.graph.output] == [piece.output]
    (feeds,) = load_data(str(tmp_path / "out" / "bisect-ort-on.inputs.json"), GraphIndex(model).inputs).samples()
    off, on = (Session(model, optimize=optimize, threads=1).run(feeds)[piece.output] for optimize in (False, True))
    noise = np.square(off - on, dtype=np.float64).sum() / np.square(off, dtype=np.float64).sum()
    assert -10 * np.log10(noise) == pytest.approx(piece.sqnr_db, abs=0.1)


@pytest.mark.recent_ort
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
        add_arrays(proto.graph, c=np.array(True))
    found = diff(float_proto, broken, samples(), layers=True, bisect=True)
    assert "node_y" in found.bisections[0].nodes
    assert "h" in by_name(found)


# ---- Every kernel of ORT by itself.


def test_every_kernel_of_a_sound_model_agrees_alone() -> None:
    feeds = images(1, seed=3)
    plain = GraphIndex(name_nodes(residual()))
    inner = open_inner(plain, indexed(quantized_cnn()), feeds, fused=True, threads=1)
    found = check_kernels(inner, feeds, threads=1)
    assert found.point is None
    assert found.kernels >= 6
    assert found.levels <= 1
    assert found.share < 0.01
    assert f"each of {found.kernels} kernels alone" in found.describe()


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
    shown = diff(proto, made, samples(), layers=True)
    assert shown.divergences == ()  # Quantization itself costs more than the fault.
    found = diff(proto, made, samples(), bisect=True)
    (part,) = found.divergences
    assert (part.run, part.tensor) == (ON, "y")
    (piece,) = found.bisections
    assert set(piece.nodes) == {"s/DequantizeLinear", "w2/DequantizeLinear", "node_y"}


@settings(max_examples=15, deadline=None)
@given(shape_nets(), st.data())
def test_parts_carry_sizes_ranks_and_sequences(net: ShapeNet, data: st.DataObject) -> None:
    proto, (feeds,) = net.model(), net.feeds((6, 11))
    sequences = ("SplitToSequence", "SequenceInsert")
    made = [name for node in proto.graph.node for name in node.output if node.op_type not in sequences]
    session = Session(
        tap_tensors(proto, [TensorId(n) for node in proto.graph.node for n in node.output]).proto, optimize=False
    )
    values = {**feeds, **session.run(feeds)}
    parts = FedParts(GraphIndex(proto), lambda wanted: {name: values[name] for name in wanted})
    output = data.draw(st.sampled_from(made))
    ends = data.draw(st.sets(st.sampled_from([*values]), max_size=4))
    model, inputs = parts.cut_fed(parts.list_between([output], ends - {output}), output)
    np.testing.assert_array_equal(Session(model, optimize=False, threads=1).run(inputs)[output], values[output])


def test_a_part_is_a_model_that_computes_the_same() -> None:
    proto = infer_shapes(name_nodes(PAIRS))
    feeds = {"x": samples(3)["x"]}
    names = ["r", "r/quantized", "r/dequantized", "b", "s"]
    tapped = onnx.ModelProto.FromString(proto.SerializeToString())
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = Session(tapped, optimize=False, threads=1).run(feeds)
    asked: list[str] = []

    def given(wanted):  # type: ignore[no-untyped-def]
        asked.extend(wanted)
        return {name: values[name] for name in wanted}

    parts = FedParts(GraphIndex(proto), given)
    inside = {"r/DequantizeLinear", "w1/DequantizeLinear", "node_b"}
    model, inputs = parts.cut_fed(inside, "b")
    onnx.checker.check_model(model)
    assert list(inputs) == ["r/quantized"]
    assert set(asked) == {"r/quantized", "b"}
    np.testing.assert_array_equal(Session(model, optimize=False, threads=1).run(inputs)["b"], values["b"])
    assert parts.list_needed(["b"], {*inside, "node_y"}) == parts.sort_names(inside)
    assert parts.list_inputs(inside) == ["r/quantized"]
