"""Overrides for the NPU, given to either tool, make the same types everywhere, and the numbers asked for."""

import copy
import inspect

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.execution_providers import qnn as theirs

from onnxq import compat
from onnxq.compat import CompatWarning
from onnxq.compat.execution_providers import qnn as ours
from tests.compat import scripts
from tests.networks import add_arrays, parse_text

BODY = """g (float[1,4,6,6] x) => (float[1,4,6,6] y, float[1,4,6,6] z) {
    a = Conv <pads=[1,1,1,1]>(x, w0, b0) b = Sigmoid(a) c = Mul(a, b)
    d = Conv <pads=[1,1,1,1]>(c, w1, b1) e = Add(d, x) y = Conv <pads=[1,1,1,1]>(e, w2, b2)
    z = Conv <pads=[1,1,1,1]>(d, w3, b3) }"""
WIDE, NARROW = compat.QuantType.QUInt16, compat.QuantType.QUInt8


def make_net(body: str = BODY) -> onnx.ModelProto:
    """A net of which every node is named after its result."""
    rng, proto = np.random.default_rng(0), parse_text(body, opset=21, ir=10)
    for name in sorted({name for node in proto.graph.node for name in node.input if name[0] in "wb" and name[1:]}):
        shape = (4, 4, 3, 3) if name[0] == "w" else (4,)
        add_arrays(proto.graph, **{name: 0.2 * rng.standard_normal(shape, np.float32)})
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return proto


class Samples(compat.CalibrationDataReader):
    def __init__(self) -> None:
        self.left = iter(scripts.make_inputs(make_net(), 4))

    def get_next(self):
        sample = next(self.left, None)
        return None if sample is None else {"x": sample}


def quantize(package, recipe, path, proto: onnx.ModelProto, overrides, **arguments) -> onnx.GraphProto:
    """The graph that one of both tools makes."""
    # The other tool stores weights of its argument elsewhere, and changes entries.
    proto = copy.deepcopy(proto)
    named = {key: kind for key, kind in arguments.items() if isinstance(kind, compat.QuantType)}
    arguments |= {key: package.QuantType[kind.name] for key, kind in named.items()}
    config = recipe.get_qnn_qdq_config(
        proto, Samples(), init_overrides=translate(overrides, package.QuantType), **arguments
    )
    with pytest.MonkeyPatch.context() as patch:
        # Not compiled: only the file is looked at, and compiling takes longer than making it.
        patch.setattr("onnxq.pipeline.finalize.check_on_engine", lambda *_: None)
        package.quantize(proto, path, config)
    return onnx.load(path).graph


def translate(entries, kinds):
    """The entries with the types of a package."""
    if isinstance(entries, dict):
        return {key: translate(value, kinds) for key, value in entries.items()}
    if isinstance(entries, list):
        return [translate(value, kinds) for value in entries]
    return kinds[entries.name] if isinstance(entries, compat.QuantType) else entries


def read_pairs(graph: onnx.GraphProto) -> dict[tuple[str, object], tuple[str, float, int]]:
    """Type, scale and zero point at each input (a number) and result ("out") of each node, of activations."""
    values = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    found = {}

    def read(pair: onnx.NodeProto) -> tuple[str, float, int]:
        scale, zero = (numpy_helper.to_array(values[name]) for name in pair.input[1:3])
        return TensorProto.DataType.Name(values[pair.input[2]].data_type), float(scale), int(zero)

    for node in graph.node:
        if node.op_type == "QuantizeLinear" and "Linear" not in makers.get(node.input[0], node).op_type:
            found[makers[node.input[0]].name, "out"] = read(node)
        if "Linear" in node.op_type:
            continue
        for k, name in enumerate(node.input):
            pair = makers.get(name)
            if pair is not None and pair.op_type == "DequantizeLinear" and pair.input[0] not in values:
                found[node.name, k] = read(pair)
    return found


CASES = {
    "none": {},
    "result": {"d": [{"quant_type": WIDE}]},
    "behind-a-sigmoid": {"c": [{"quant_type": WIDE}]},
    "input": {"x": [{"quant_type": WIDE}]},
    "converted": {"d": [{"quant_type": NARROW, "convert": {"quant_type": WIDE, "recv_nodes": {"Add_e"}}}]},
    "converted-for-all": {"e": [{"quant_type": NARROW, "convert": {"quant_type": WIDE}}]},
    "said-twice": {"d": [{"quant_type": WIDE}], "e": [{"quant_type": WIDE}], "c": [{"quant_type": NARROW}]},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_types_are_theirs(overrides, tmp_path) -> None:
    """At each input and each result, with conversions where operators of other widths meet."""
    made = [
        {at: kind for at, (kind, _, _) in read_pairs(graph).items()}
        for graph in (
            quantize(quantization, theirs, tmp_path / "theirs.onnx", make_net(), overrides),
            quantize(compat, ours, tmp_path / "ours.onnx", make_net(), overrides),
        )
    ]
    assert len(made[0]) == 16
    assert made[1] == made[0]
    assert ("UINT16" in made[1].values()) == bool(overrides)


@pytest.mark.parametrize("kind", ["QUInt8", "QInt8", "QUInt16", "QInt16"])
def test_a_width_of_all_is_theirs(kind: str, tmp_path) -> None:
    """Ours are unsigned, which has the same steps and takes up a Relu."""
    types = {"activation_type": compat.QuantType[kind], "weight_type": compat.QuantType.QInt8}
    made = read_pairs(quantize(quantization, theirs, tmp_path / "theirs.onnx", make_net(), {}, **types))
    mine = read_pairs(quantize(compat, ours, tmp_path / "ours.onnx", make_net(), {}, **types))
    assert {one for one, _, _ in made.values()} == {kind[1:].upper()}
    assert {at: one for at, (one, _, _) in mine.items()} == {
        at: f"U{one.removeprefix('U')}" for at, (one, _, _) in made.items()
    }


def test_numbers_are_theirs(tmp_path) -> None:
    """Of ranges, and of scales with zero points."""
    numbers = {
        "a": [{"rmin": np.float32(-0.5), "rmax": np.float32(2.0)}],
        "c": [{"rmin": np.float32(-1), "rmax": np.float32(3), "quant_type": NARROW}],
        "e": [{"scale": np.array(0.05, np.float32), "zero_point": np.array(100, np.uint8)}],
        "z": [{"quant_type": WIDE, "rmin": np.float32(-8), "rmax": np.float32(8)}],
    }
    made, mine = (
        read_pairs(quantize(package, recipe, tmp_path / "m.onnx", make_net(), copy.deepcopy(numbers)))
        for package, recipe in ((quantization, theirs), (compat, ours))
    )
    for at in [
        ("Conv_a", "out"),
        ("Sigmoid_b", 0),
        ("Mul_c", "out"),
        ("Add_e", "out"),
        ("Conv_y", 0),
        ("Conv_z", "out"),
    ]:
        kind, scale, zero = made[at]
        assert mine[at] == (kind, pytest.approx(scale, rel=1e-6), zero), at
    assert mine["Add_e", "out"][1:] == (np.float32(0.05), 100)


def test_a_signed_scale_is_an_unsigned_one_with_its_zero_point_moved(tmp_path) -> None:
    overrides = {"e": [{"scale": 0.05, "zero_point": -28}]}
    kind = compat.QuantType.QInt8
    mine = read_pairs(quantize(compat, ours, tmp_path / "m.onnx", make_net(), overrides, activation_type=kind))
    assert mine["Add_e", "out"] == ("UINT8", np.float32(0.05), 100)


def test_both_sides_of_a_conversion_have_the_range(tmp_path) -> None:
    """Also the wide side, for which the other tool takes the range that it saw."""
    overrides = {"y": [{"quant_type": WIDE}], "e": [{"scale": 0.05, "zero_point": 100}]}
    mine = read_pairs(quantize(compat, ours, tmp_path / "m.onnx", make_net(), overrides))
    assert mine["Add_e", "out"] == ("UINT8", np.float32(0.05), 100)
    kind, scale, zero = mine["Conv_y", 0]
    assert (kind, scale * 65535, zero) == ("UINT16", pytest.approx(0.05 * 255), 25700)


def test_without_converts_a_wide_tensor_is_wide_for_itself(tmp_path) -> None:
    overrides = {"d": [{"quant_type": WIDE}]}
    made, mine = (
        {at: one for at, (one, _, _) in read_pairs(graph).items()}
        for graph in (
            quantize(quantization, theirs, tmp_path / "t.onnx", make_net(), overrides, add_qtype_converts=False),
            quantize(compat, ours, tmp_path / "o.onnx", make_net(), overrides, add_qtype_converts=False),
        )
    )
    assert mine == made
    assert [at for at, kind in mine.items() if kind == "UINT16"] == [("Conv_d", "out"), ("Add_e", 0), ("Conv_z", 0)]


def test_what_is_taken_up_or_moved_has_the_width_of_its_kernel(tmp_path) -> None:
    """A Relu goes into its Conv, and a Reshape moves what the Conv wrote: both of which get the width."""
    body = """g (float[1,4,6,6] x) => (float[1,144] y) {
        a = Conv <pads=[1,1,1,1]>(x, w0, b0) b = Conv <pads=[1,1,1,1]>(a, w1, b1) r = Relu(b)
        f = Flatten(r) y = Mul(f, f) }"""
    mine = read_pairs(quantize(compat, ours, tmp_path / "m.onnx", make_net(body), {"f": [{"quant_type": WIDE}]}))
    kinds = {at: kind for at, (kind, _, _) in mine.items()}
    assert (kinds["Conv_a", "out"], kinds["Conv_b", 0]) == ("UINT8", "UINT16")
    assert {kinds[at] for at in (("Relu_r", "out"), ("Flatten_f", 0), ("Mul_y", 0), ("Mul_y", "out"))} == {"UINT16"}


def test_operators_around_a_wide_tensor_run_in_integers(tmp_path) -> None:
    pytest.importorskip("onnxruntime_qnn", reason="the NPU's compiler is not installed")
    proto = make_net()
    config = ours.get_qnn_qdq_config(proto, Samples(), init_overrides={"d": [{"quant_type": WIDE}]})
    (check,) = compat.quantize(proto, tmp_path / "m.onnx", config).report.engines
    assert (check.partitions, check.left, dict(check.types)) == (1, (), {"int8": 2, "int16": 2})


def test_a_weight_of_four_bits(tmp_path) -> None:
    overrides = {"w1": [{"quant_type": compat.QuantType.QInt4, "axis": 0}]}
    graph = quantize(compat, ours, tmp_path / "m.onnx", make_net(), overrides, activation_type=WIDE)
    kinds = {tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 4}
    assert kinds == {TensorProto.INT4, TensorProto.INT8}


def test_entries_and_arguments_that_mean_nothing_are_said(tmp_path) -> None:
    overrides = {
        "e": [{"convert": {"quant_type": WIDE, "recv_nodes": {"Conv_y", "Conv_d"}}, "symmetric": True}],
        "w0": [{"scale": 0.1, "zero_point": 0, "axis": 0, "reduce_range": True}],
        "q": [{"quant_type": WIDE}],
    }
    with pytest.warns(CompatWarning) as caught:
        quantize(compat, ours, tmp_path / "m.onnx", make_net(), overrides, activation_symmetric=True,
                 weight_symmetric=False)  # fmt: skip
    said = [str(one.message) for one in caught if one.message.code == "W130"]
    assert [text.split(" means")[0] for text in said] == [
        "ActivationSymmetric", "WeightSymmetric", "TensorQuantOverrides: 'q'",
        "TensorQuantOverrides: 'symmetric' of 'e'", "TensorQuantOverrides: 'recv_nodes' of 'e'",
        "TensorQuantOverrides: 'scale' of 'w0'", "TensorQuantOverrides: 'zero_point' of 'w0'",
        "TensorQuantOverrides: 'reduce_range' of 'w0'",
    ]  # fmt: skip
    assert "'Conv_d' does not read it" in said[4]


@pytest.mark.parametrize("name", ["get_qnn_qdq_config", "qnn_preprocess_model"])
def test_signatures_are_theirs(name: str) -> None:
    others = inspect.signature(getattr(theirs, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    assert list(mine)[: len(others)] == list(others)
    for key, one in others.items():
        assert getattr(mine[key].default, "name", mine[key].default) == getattr(one.default, "name", one.default), key


def test_preprocessing_fixes_sizes(tmp_path) -> None:
    proto = make_net(BODY.replace("float[1,4,6,6] x", "float[N,4,6,6] x"))
    proto.graph.node[0].name = ""
    assert ours.qnn_preprocess_model(proto, tmp_path / "m.onnx", dynamic_input_shapes=[("x", "1,4,6,6")])
    done = onnx.load(tmp_path / "m.onnx")
    assert all(node.name for node in done.graph.node)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in
              (*done.graph.input, *done.graph.value_info)}  # fmt: skip
    assert shapes["x"] == shapes["e"] == [1, 4, 6, 6]


def test_channels_come_last_where_that_is_asked_for(tmp_path) -> None:
    proto = make_net()
    outputs = [value.name for value in proto.graph.output if len(value.type.tensor_type.shape.dim) > 2]
    ours.qnn_preprocess_model(
        proto, tmp_path / "m.onnx", inputs_to_make_channel_last=["x"], outputs_to_make_channel_last=outputs
    )
    # The model given is as it was.
    assert [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim] == [1, 4, 6, 6]
    x = np.random.default_rng(0).standard_normal((1, 4, 6, 6)).astype(np.float32)
    before = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    after = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.transpose(0, 2, 3, 1)})
    for value, old, new in zip(proto.graph.output, before, after, strict=True):
        np.testing.assert_allclose(np.moveaxis(old, 1, -1) if value.name in outputs else old, new, rtol=1e-5)
    with pytest.raises(ValueError, match="Expected output y to be of rank >= 3"):
        ours.qnn_preprocess_model(
            scripts.make_net(scripts.CLASSIFIER), tmp_path / "m.onnx", outputs_to_make_channel_last=["y"]
        )


def test_preprocessing_warns_of_options_without_an_effect(tmp_path) -> None:
    with pytest.warns(CompatWarning, match="external_data_location means nothing here") as caught:
        ours.qnn_preprocess_model(make_net(), tmp_path / "m.onnx", external_data_location="w")
    assert caught[0].filename == __file__
