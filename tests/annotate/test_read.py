"""Pairs of every tool are found, named by their site, their bits read from the right sign, and attributes with them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxq
from onnxq.annotate import OperatorInfo, Origin, PairInfo, find_operators, find_pairs, inspect_model, read_model
from onnxq.annotate.read import drop_attribute, list_pair_nodes, set_attribute
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor
from tests.annotate import models
from tests.cli.kit import read, run
from tests.networks import parse_text
from tests.pipeline.models import Reader
from tests.pipeline.requantized import by_onnxruntime


def by_site(proto: onnx.ModelProto) -> dict[str, PairInfo]:
    pairs = find_pairs(proto)
    found = {str(pair.site): pair for pair in pairs}
    assert len(found) == len(pairs)
    return found


def test_sites_roles_bits_and_where_they_were_read():
    found = by_site(models.two_widths())
    assert list(found) == ["x", "w", "b", "c", "y"]
    seen = {name: (str(p.role), p.bits, str(p.origin), p.storage, p.ops) for name, p in found.items()}
    assert seen == {
        "x": ("activation", 8, "type", "uint8", ("Conv",)),
        "w": ("weight", 4, "values", "int8", ("Conv",)),
        "b": ("bias", 32, "type", "int32", ("Conv",)),
        "c": ("activation", 4, "clip", "int8", ("Relu",)),
        "y": ("output", 8, "type", "uint8", ("Relu",)),
    }
    assert found["c"].nodes == ("c/Clip", "c/QuantizeLinear", "c/DequantizeLinear")
    assert found["w"].granularity == PerChannel(0)
    assert (found["w"].scales, found["w"].scale_min, found["w"].scale_max) == (4, np.float32(0.05), np.float32(0.3))
    assert found["w"].levels == (-7, 7)
    assert found["x"].granularity == PerTensor()
    assert [found[name].scheme for name in "xwc"] == ["symmetric", "symmetric", "symmetric"]


def test_models_of_ort_quantizer(tmp_path):
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    samples = np.random.default_rng(0).normal(size=(2, 4, 8, 8)).astype("f4")
    source, made = tmp_path / "f.onnx", tmp_path / "q.onnx"
    onnx.save(models.float_conv(), source)
    quantize_static(
        source, made, Reader(samples), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    found = {str(pair.site): pair for pair in inspect_model(made).pairs}
    assert {name: (str(p.role), p.bits, p.storage) for name, p in found.items()} == {
        "x": ("activation", 8, "uint8"),
        "w1": ("weight", 8, "int8"),
        "b1": ("bias", 32, "int32"),
        "r1": ("activation", 8, "uint8"),
        "w2": ("weight", 8, "int8"),
        "c2": ("activation", 8, "uint8"),
        "y": ("output", 8, "uint8"),
    }
    assert found["r1"].ops == ("Conv", "Add")
    assert not found["r1"].symmetric
    assert found["w1"].symmetric


@pytest.mark.parametrize(("low", "high", "bits"), [(-8, 7, 4), (-7, 7, 4), (-128, 127, 8), (0, 1, 2), (-63, 63, 7)])
def test_integer_clip_of_qcdq(low, high, bits):
    found = by_site(models.qcdq(low, high))
    assert (found["x"].bits, found["x"].origin) == (bits, Origin.CLIP if bits < 8 else Origin.TYPE)
    assert found["x"].ops == ("MatMul",)
    assert (found["w_int"].bits, found["w_int"].origin) == (2, Origin.CLIP)


def test_types_that_say_it_all():
    found = by_site(models.sub_byte())
    seen = {name: (p.bits, str(p.origin), p.storage, p.granularity, p.symmetric) for name, p in found.items()}
    assert seen == {
        "a": (4, "type", "int4", PerChannel(1), True),
        "b_int": (4, "type", "uint4", PerBlock(0, 4), False),
        "y": (8, "type", "float8e4m3fn", PerTensor(), True),
    }


def test_bodies_are_searched_and_captured_tensors_keep_their_scope():
    found = find_pairs(models.branches())
    assert [(p.site, p.scope, p.ops) for p in found] == [
        (TensorId("e_out", "If_0.else_branch"), "If_0.else_branch", ("Abs",)),
        (TensorId("x"), "If_0.then_branch", ("Neg",)),
    ]
    assert not found[1].symmetric


def test_dedicated_pairs_are_edges_in_any_domain():
    assert [(p.site, p.bits, p.storage) for p in find_pairs(models.dedicated())] == [
        (Edge("relu", 0), 16, "uint16"),
        (Edge("add", 1), 16, "uint16"),
    ]


def test_a_float_weight_in_front_of_its_pair():
    found = by_site(models.modelopt())
    assert (found["w"].role, found["w"].bits, found["w"].levels) == (Role.WEIGHT, 8, (-127, 127))
    assert found["x"].role is Role.ACTIVATION


def test_a_clip_of_the_network_is_no_bit_width():
    found = by_site(models.relu6(6.0))
    assert (found["c"].bits, found["c"].origin, found["c"].clip) == (8, Origin.TYPE, "")
    # Levels 0..25 of 255: the network clips far below the range, which is no width anybody meant.
    assert by_site(models.relu6(0.6))["c"].bits == 8


def test_nodes_without_partner_and_scales_at_run_time():
    (found,) = find_pairs(models.lone_nodes())
    assert (found.quantize, found.dequantize, found.scales, found.ops) == ("q", "", 0, ("Cast",))
    assert np.isnan(found.scale_min)


def test_pairs_in_functions_are_found_with_a_word_about_it():
    seen = inspect_model(models.in_function())
    assert [str(pair.site) for pair in seen.pairs] == ["x", "y"]
    assert "local::FakeQuant" in seen.warnings[0]


def with_attribute(proto: onnx.ModelProto, bits: int, only: str = "") -> onnx.ModelProto:
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and only in node.name:
            node.attribute.append(helper.make_attribute("bits", bits))
    return proto


def test_sparsebits_attribute_is_read_though_the_checker_refuses_the_file(tmp_path):
    path = models.save(tmp_path, with_attribute(models.two_widths(), 5, "in_"))
    with pytest.raises(onnx.checker.ValidationError, match="bits"):
        onnx.checker.check_model(str(path))
    seen = inspect_model(path)
    found = {str(pair.site): pair for pair in seen.pairs}
    assert (found["x"].bits, found["x"].origin) == (5, Origin.ATTRIBUTE)
    assert (found["c"].bits, found["c"].origin) == (4, Origin.CLIP)
    assert not any(entry.key.startswith("onnxq") for node in seen.model.graph.node for entry in node.metadata_props)


def test_attribute_and_external_data_together(tmp_path):
    apart = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0}
    path = models.save(tmp_path, with_attribute(models.two_widths(), 6), **apart)
    found = {str(pair.site): pair for pair in inspect_model(path).pairs}
    assert {name: (p.bits, str(p.origin)) for name, p in found.items()}["x"] == (6, "attribute")
    assert found["w"].levels == (-7, 7)


def test_attribute_that_the_type_cannot_hold_is_not_believed():
    found = by_site(with_attribute(models.sub_byte(), 8))
    assert (found["a"].bits, found["a"].origin) == (4, Origin.TYPE)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"in_q": 3}',
        '{"in_q": {"bits": "many"}}',
        '{"in_q": {"bits": "\\u00b2", "role": [], "site": 3}}',
        "[" * 5000,
        '{"in_q": {"bits": ' + "9" * 5000 + "}}",
    ],
)
def test_damaged_metadata_is_told_or_left_alone_never_fatal(text):
    proto = models.two_widths()
    proto.metadata_props.add(key="onnxq.bits", value=text)
    seen = inspect_model(proto)
    assert {str(p.site): p.bits for p in seen.pairs}["x"] == 8
    if text in ("{", "[1]") or len(text) > 1000:
        assert "onnxq.bits" in seen.warnings[0]


def test_damaged_plan_is_told():
    proto = models.two_widths()
    proto.metadata_props.add(key="onnxq.plan", value='{"schema": 99}')
    warning = inspect_model(proto).warnings[0]
    assert (warning.code, "onnxq.plan" in warning) == ("W106", True)


def test_few_or_only_zero_values_say_nothing():
    for levels in (np.zeros((4, 4, 3, 3), np.int8), np.ones((4, 1, 1, 1), np.int8)):
        text = f"wd = DequantizeLinear(w, s, z) y = Conv <group={4 // levels.shape[1]}>(x, wd)"
        (found,) = find_pairs(models.model(text, w=levels, s=np.float32(1), z=np.int8(0)))
        assert (found.bits, found.origin) == (8, Origin.TYPE)


def test_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError):
        inspect_model(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x07garbage")
    with pytest.raises(ModelError):
        inspect_model(tmp_path / "bad.onnx")


def test_reading_changes_nothing(tmp_path):
    path = models.save(tmp_path, models.two_widths())
    before = path.read_bytes()
    inspect_model(path)
    assert path.read_bytes() == before
    for look, proto in ((find_pairs, models.dedicated()), (read_model, with_attributes(models.two_widths))):
        text = proto.SerializeToString(deterministic=True)
        look(proto)
        assert proto.SerializeToString(deterministic=True) == text


def test_signed_and_unsigned_middle():
    proto = models.two_widths()
    for init in proto.graph.initializer:
        if init.name == "xz":
            init.CopyFrom(helper.make_tensor("xz", TensorProto.UINT8, [], [127]))
    assert not by_site(proto)["x"].symmetric


def with_attributes(make, bits: int = 5) -> onnx.ModelProto:
    proto = make()
    for node in list_pair_nodes(proto):
        set_attribute(node, bits)
    return proto


@pytest.mark.parametrize("make", [models.two_widths, models.branches, models.in_function, models.dedicated])
def test_attributes_in_every_graph_survive_reading(make, tmp_path: Path) -> None:
    proto = with_attributes(make)
    for source in (proto, models.save(tmp_path, proto)):
        nodes = list_pair_nodes(read_model(source).proto)
        assert [drop_attribute(node) for node in nodes] == [5] * len(nodes)
        assert len(nodes) == len(list_pair_nodes(proto))


def test_an_attribute_is_set_once_and_dropped_once() -> None:
    node = list_pair_nodes(models.two_widths())[0]
    kept = len(node.attribute)
    set_attribute(node, 4)
    set_attribute(node, 7)
    assert len(node.attribute) == kept + 1
    assert drop_attribute(node) == 7
    assert drop_attribute(node) is None


def test_size_and_files_are_those_of_the_file(tmp_path: Path) -> None:
    path = models.save(tmp_path, with_attributes(models.two_widths))
    read = read_model(path)
    assert (read.path, read.size_bytes, read.external) == (path, path.stat().st_size, False)
    assert read.files == (path,)


def test_a_fault_beside_the_attribute_stays_an_error(tmp_path: Path) -> None:
    proto = with_attributes(models.two_widths)
    proto.graph.node[-1].input[0] = "nobody"
    with pytest.raises(ModelError, match=r"\[Q103\]"):
        read_model(models.save(tmp_path, proto))


# ---- Operators that compute on integers themselves are listed, not passed over.

_FOUND = [
    ("QLinearConv", ""), ("QLinearMatMul", ""), ("MatMulInteger", ""), ("ConvInteger", ""),
    ("DynamicQuantizeLinear", ""),
    ("QGemm", "com.microsoft"), ("QLinearAdd", "com.microsoft"), ("DynamicQuantizeMatMul", "com.microsoft"),
    ("MatMulIntegerToFloat", "com.microsoft"), ("QAttention", "com.microsoft"), ("MatMulNBits", "com.microsoft"),
    ("DynamicQuantizeLSTM", "com.microsoft"), ("QLinearSoftmax", "com.microsoft"),
]  # fmt: skip
_PASSED = [("QuantizeLinear", ""), ("DequantizeLinear", ""), ("Conv", ""), ("MatMul", ""), ("QLinearConv", "other")]


def one_node(op: str, domain: str, attrs: str = "") -> onnx.ModelProto:
    """A graph of one node that reads a float and an int8 constant; only ever looked at."""
    kind = f"{domain}.{op}" if domain else op
    text = f"g (float[2,2] x) => (float[2,2] y) {{ [n] y = {kind}{attrs}(x, w) }}"
    return parse_text(text, *filter(None, [domain]), w=np.ones((2, 2), np.int8))


@pytest.mark.parametrize(("op", "domain"), [*_FOUND, *_PASSED])
def test_operators_on_integers_are_found_and_no_others(op: str, domain: str) -> None:
    info = OperatorInfo(node="n", op=op, domain=domain, bits=8, types=("int8",))
    assert find_operators(GraphIndex(one_node(op, domain))) == ((info,) if (op, domain) in _FOUND else ())


def test_the_bits_are_those_of_the_attribute() -> None:
    (found,) = find_operators(GraphIndex(one_node("MatMulNBits", "com.microsoft", "<bits=4>")))
    assert found.bits == 4


def test_inspect_and_annotate_bits_list_them(tmp_path: Path) -> None:
    path = models.save(tmp_path, by_onnxruntime(tmp_path, "QOperator"))
    names = {node.name for node in name_nodes(onnx.load(path)).graph.node if node.name.endswith("_quant")}
    for command in ("inspect", "annotate-bits"):
        shown = run(command, path).output
        assert "6 operators on integers: 1 QGemm, 1 QLinearAdd, 3 QLinearConv" in " ".join(shown.split())
        found = read(command, path, *["--force"][: command[0] == "a"])["operators"]
        assert {one["node"] for one in found} == names
        assert {one["op"] for one in found} >= {"QLinearConv", "QGemm", "QLinearGlobalAveragePool"}
    assert onnxq.inspect(path).operators[0].types == ("uint8", "int8")
