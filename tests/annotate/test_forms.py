"""Pairs of few bits in every form that is written compute what numerics computes, in ONNX Runtime and in numpy."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnxq
from onnxq.annotate import Origin, annotate_model, check_notes, find_pairs, read_model
from onnxq.annotate.bits import is_quantizer_clip, read_bits, read_clip_bits, read_noted_bits, read_numbers
from onnxq.annotate.find import find_chains, find_site
from onnxq.annotate.forms import FORMS
from onnxq.errors import ModelError
from onnxq.graph import ensure_opset, get_index, name_nodes
from onnxq.numerics import fake_quant
from onnxq.runtime import Session
from onnxq.sites import Edge, TensorId, is_within, split_scope
from onnxq.spec import ELEMENT_TYPES, PerChannel, PerTensor, QParams, QuantSpec, find_element_type
from tests.annotate import models

ORT_FORMS = ("clip-qdq", "qcdq", "native")


class Quant(OpRun):
    """As QONNX specifies it."""

    op_domain = "qonnx.custom_op.general"

    def _run(self, x, scale, zero, bits, signed=1, narrow=0, rounding_mode="ROUND"):
        assert rounding_mode == "ROUND"
        low = -(2 ** (bits - 1)) + narrow if signed else 0
        high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
        codes = np.clip(np.rint(x / scale + zero), low, high)
        return (((codes - zero) * scale).astype(x.dtype),)


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """The answers of ONNX Runtime with optimizations off and on; of numpy for operators that it lacks."""
    if any(node.op_type == "Quant" for node in proto.graph.node):
        return [ReferenceEvaluator(ensure_opset(proto, 21), new_ops=[Quant]).run(None, {"x": x})[0]]
    return [Session(proto, optimize=optimize).run({"x": x})["y"] for optimize in (False, True)]


@st.composite
def labels(draw: st.DrawFn) -> tuple[QuantSpec, QParams]:
    """A spec of few bits in bytes, with its numbers; even zero points, since QONNX rounds ties behind adding them."""
    bits, signed = draw(st.integers(2, 7)), draw(st.booleans())
    grain = draw(st.sampled_from([PerTensor(), PerChannel(1)]))
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False, granularity=grain)
    shape = () if grain == PerTensor() else (4,)
    zero = 2 * draw(st.integers(-(-spec.qmin // 2), spec.qmax // 2))
    scale = draw(st.floats(2.0**-10, 4, width=32))
    spread = np.linspace(1, 3, 4, dtype=np.float32) if shape else np.float32(1)
    return spec, QParams(np.asarray(scale * spread, np.float32), np.full(shape, zero, np.int32))


def label(spec: QuantSpec, numbers: QParams) -> onnx.ModelProto:
    """A pair in bytes with nothing that bounds it, behind it a weight of the same levels, and its result."""
    codes = np.arange(spec.qmin, spec.qmax + 1).astype(spec.numpy_storage)
    text = f"{models.pair('x', 'xd', names=('q', 'dq'))} [w_dq] wd = DequantizeLinear(w, s0, z0) y = Add(xd, wd)"
    numbers = {"s": np.asarray(numbers.scale), "z": np.asarray(numbers.zero_point, spec.numpy_storage)}
    weight = np.resize(codes, (1, 4, 8, 8))
    return models.model(text, **numbers, w=weight, s0=np.float32(0.5), z0=np.zeros((), spec.numpy_storage))


@pytest.mark.recent_ort
@settings(max_examples=25, deadline=None)
@given(labels(), st.sampled_from(FORMS), st.sampled_from(ORT_FORMS), st.integers(0, 2**16))
def test_every_form_computes_what_numerics_does(drawn, form, before, seed):
    spec, numbers = drawn
    proto = label(spec, numbers)
    spread = spec.qmax * numbers.scale.max()
    x = (np.random.default_rng(seed).normal(size=(1, 4, 8, 8)) * spread).astype(np.float32)
    weight = np.resize(np.arange(spec.qmin, spec.qmax + 1), x.shape).astype(np.float32) * np.float32(0.5)
    expected = fake_quant(x, numbers, spec) + weight
    # From one form to the other, by way of a third.
    first = annotate_model(proto, given=[("*", spec.bits)], form=before)
    second = annotate_model(first.model, form=form)
    for found in (first, second):
        assert [pair.bits for pair in found.pairs] == [spec.bits, spec.bits]
        assert not check_notes(found.model).disagreements
        for answer in run(found.model, x):
            np.testing.assert_array_equal(answer, expected)


@pytest.mark.recent_ort
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", models.RUNNING)
def test_models_of_all_tools_keep_their_answers(make, form):
    x = np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float32)
    written = annotate_model(make(), form=form)
    assert [pair.bits for pair in written.pairs] == [pair.bits for pair in find_pairs(make())]
    if make is not models.branches or form != "qonnx":
        expected, *_ = run(make(), x)
        differs = np.abs(run(written.model, x)[0] - expected) > (1e-5 if form == "qonnx" else 0)
        # The operator of qonnx runs between float sums in another order, which may cross an edge between two levels.
        assert differs.mean() <= (0.01 if form == "qonnx" else 0)


def test_a_form_written_twice_is_the_same_file():
    for form in ORT_FORMS:
        once = annotate_model(models.two_widths(), form=form).model
        assert annotate_model(once, form=form).model == once


def test_native_takes_the_types_that_onnx_has():
    spec = QuantSpec(bits=2, signed=False, symmetric=False)
    numbers = QParams(np.float32(0.5), np.int32(2))
    found = annotate_model(label(spec, numbers), given=[("x", 2), ("w*", 4)], form="native")
    assert [pair.storage for pair in found.pairs] == ["uint2", "uint4"]
    assert found.model.opset_import[0].version == 25
    onnx.checker.check_model(found.model, full_check=True)


@pytest.mark.recent_ort
def test_a_narrow_range_stays_one():
    """-7 to 7 of a Clip, not -8: the form holds it where its own type does not."""
    x = np.linspace(-2, 2, 256, dtype=np.float32).reshape(1, 4, 8, 8)
    expected = run(models.qcdq(), x)[0]
    for form in FORMS:
        np.testing.assert_allclose(run(annotate_model(models.qcdq(), form=form).model, x)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "given", "form", "why"),
    [
        (lambda: models.dedicated(), [("*", 8)], "qcdq", "no Clip takes uint16"),
        (lambda: models.sub_byte(), [], "qonnx", "Quant has no blocks"),
        (lambda: models.qcdq(-2, 2), [], "clip-qdq", "its Clip leaves other levels than 3 bits have"),
        (lambda: models.relu6(6), [("c", 4)], "clip-qdq", ""),
        (lambda: models.lone_nodes(), [("*", 4)], "clip-qdq", "of another kind"),
        (lambda: models.two_widths(), [("x", 4)], "clip-qdq", "its zero point is no level of 4 bits"),
    ],
)
def test_a_pair_that_stays_is_named_with_the_reason(make, given, form, why):
    warned = [text for text in annotate_model(make(), given=given, form=form).warnings if "stay as they are" in text]
    assert why in " ".join(warned) if why else not warned


# ---- QONNX's operators read as pairs compute what QONNX specifies, whatever their bits, signs and ways of rounding.

DOMAIN = "qonnx.custom_op.general"


def round_as(mode: str, x: np.ndarray) -> np.ndarray:
    """The ways of rounding of QONNX, from its specification."""
    size, sign = np.abs(x), np.sign(x)
    ways = {
        "ROUND": np.round(x),
        "CEIL": np.ceil(x),
        "FLOOR": np.floor(x),
        "UP": sign * np.ceil(size),
        "DOWN": sign * np.floor(size),
        "HALF_UP": sign * np.floor(size + np.float32(0.5)),
        "HALF_DOWN": sign * np.ceil(size - np.float32(0.5)),
    }
    return ways[mode]


def quantize(x, scale, zero, bits, signed, narrow, mode):
    """Quant, from its specification, in float32."""
    low = np.float32(-(2.0 ** (bits - 1)) + narrow if signed else 0)
    high = np.float32(2.0 ** (bits - 1) - 1 if signed else 2.0**bits - 1 - narrow)
    return (round_as(mode, np.clip(x / scale + zero, low, high)) - zero) * scale


def make_model(op_type: str, numbers, attrs, x: np.ndarray, *, constant: bool, version: int = 1) -> onnx.ModelProto:
    """One operator on an input, or on a constant that is added to it."""
    names = [f"n{k}" for k in range(len(numbers))]
    source = "w" if constant else "x"
    nodes = [helper.make_node(op_type, [source, *names], ["q"], name="quant", domain=DOMAIN, **attrs)]
    nodes.append(helper.make_node("Sub" if constant else "Identity", ["q", "x"][: 1 + constant], ["y"], name="last"))
    tensors = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in zip(names, numbers, strict=True)]
    if constant:
        tensors.append(numpy_helper.from_array(x, "w"))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape)) for name in "xy"]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def answer(model: onnx.ModelProto, x: np.ndarray, *, constant: bool) -> np.ndarray:
    read = read_model(model).proto
    onnx.checker.check_model(read, full_check=True)
    assert not [node for node in read.graph.node if node.domain]
    return Session(read, optimize=False).run({"x": np.zeros_like(x) if constant else x})["y"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 12),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["ROUND", "CEIL", "FLOOR", "UP", "DOWN", "HALF_UP", "HALF_DOWN"]),
    st.sampled_from([(), (1,), (3, 1, 1), (1, 3, 1, 1)]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_quant_computes_what_it_says(bits, signed, narrow, mode, shape, constant, moved, seed) -> None:
    rng = np.random.default_rng(seed)
    # Powers of two, so that no quotient is rounded before it is rounded.
    scale = (2.0 ** rng.integers(-6, 2, shape)).astype(np.float32)
    zero = np.float32(2 * rng.integers(0, 2 ** (bits - 2)) if moved else 0)
    x = (rng.integers(-(2 ** (bits + 2)), 2 ** (bits + 2), (2, 3, 4, 4)) / 4 * scale.max()).astype(np.float32)
    attrs = {"signed": int(signed), "narrow": int(narrow), "rounding_mode": mode}
    model = make_model("Quant", (scale, zero, bits), attrs, x, constant=constant)
    expected = quantize(x, scale, zero, bits, signed, narrow, mode)
    np.testing.assert_array_equal(answer(model, x, constant=constant), expected)
    pairs = find_pairs(read_model(model).proto)
    # A constant of few values may look narrower than it was meant.
    assert len(pairs) == (bits <= 8 or (constant and bits <= 16))
    if pairs and not constant and not narrow:
        assert pairs[0].bits == bits


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_trunc_of_both_versions(constant: bool, version: int) -> None:
    x = (np.random.default_rng(0).integers(0, 1024, (1, 2, 8, 8)) / 64).astype(np.float32)
    scale, coarse = np.float32(1 / 64), np.float32(1 / 4)
    numbers = (scale, 0, 10, 6) if version == 1 else (scale, 0, 10, coarse, 6)
    attrs = {"rounding_mode": "FLOOR"} | ({"signed": 0, "narrow": 0} if version == 2 else {})
    model = make_model("Trunc", numbers, attrs, x, constant=constant, version=version)
    codes = np.floor(np.round(x / scale) / 16)
    expected = codes * scale if version == 1 else np.clip(codes, 0, 63) * coarse
    np.testing.assert_array_equal(answer(model, x, constant=constant), expected)
    read = read_model(model)
    # Version 1 says nothing of its levels, so nothing bounds them.
    assert len(find_pairs(read.proto)) == (version == 2)
    assert [note.code for note in read.notes if hasattr(note, "code")] == ["W145"][: version == 1]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("op_type", ["BipolarQuant", "Quant"])
def test_signs(constant: bool, op_type: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype(np.float32)
    x[0, 0, 0, :2] = 0.0, -0.0
    numbers = (0.25,) if op_type == "BipolarQuant" else (0.25, 0, 1)
    model = make_model(op_type, numbers, {} if op_type == "BipolarQuant" else {"signed": 1}, x, constant=constant)
    np.testing.assert_array_equal(answer(model, x, constant=constant), np.where(x >= 0, 0.25, -0.25).astype(np.float32))
    (pair,) = find_pairs(read_model(model).proto)
    assert pair.bits == 2


@pytest.mark.parametrize("make", [models.two_widths, models.qcdq, models.modelopt])
def test_what_is_written_as_qonnx_is_read_as_the_same_pairs(make) -> None:
    before = find_pairs(make())
    written = annotate_model(make(), form="qonnx").model
    assert any(node.op_type == "Quant" for node in written.graph.node)
    found, wanted = (
        sorted((pair.bits, pair.scale_min, pair.scale_max) for pair in pairs)
        for pairs in (find_pairs(read_model(written).proto), before)
    )
    assert found == wanted


def test_numbers_that_are_not_constant_are_an_error_by_name() -> None:
    x = np.ones((1, 2), np.float32)
    model = make_model("Quant", (0.5, 0, 8), {"signed": 1}, x, constant=False)
    model.graph.node[0].input[1] = "x"
    with pytest.raises(ModelError, match=r"quant: its input 1 is computed at run time.*\[Q518\]"):
        onnxq.inspect(model)
    other = make_model("Quant", (0.5, 0, 8), {"signed": 1, "rounding_mode": "ODD"}, x, constant=False)
    with pytest.raises(ModelError, match="rounds by 'ODD'"):
        onnxq.inspect(other)
    with pytest.raises(ModelError, match="not above 0"):
        onnxq.inspect(make_model("BipolarQuant", (0.0,), {}, x, constant=False))


# ---- Bits by every sign of the file, the arithmetic behind each, the order of trust, and the site of each pair.


@pytest.mark.parametrize(("record", "bits"), [
    (None, None), ({}, None), ({"bits": 4}, 4), ({"bits": "12"}, 12), ({"bits": 64}, 64), ({"bits": 65}, None),
    ({"bits": 0}, None), ({"bits": -4}, None), ({"bits": "4.0"}, None), ({"bits": "٤٤٤"}, None),
])  # fmt: skip
def test_only_sane_notes_count(record: dict[str, object] | None, bits: int | None) -> None:
    assert read_noted_bits(record) == bits


def test_every_type_of_onnx_has_a_width_and_a_sign() -> None:
    for name in ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"):
        kind = find_element_type(name)
        assert (kind.bits, kind.signed, kind.is_float) == (int(name.strip("uint")), name[0] != "u", False)
    assert {name for name, kind in ELEMENT_TYPES.items() if kind.is_float} >= {"float", "double", "float8e4m3fn"}
    assert find_element_type("float8e5m2").bits == 8
    assert find_element_type("type99") == find_element_type("") == find_element_type("int8")
    known = {name.lower() for name in TensorProto.DataType.keys()}  # noqa: SIM118 - a protobuf enum, no mapping
    newer = {"int2", "uint2", "float6e2m3", "float6e3m2", "float8e8m0", "float4e2m1"}
    assert set(ELEMENT_TYPES) - newer <= known


def chain_of(model: onnx.ModelProto, number: int = 0):
    index = get_index(name_nodes(model))
    chain = list(find_chains(index))[number]
    return index, chain, read_numbers(index, chain)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_float_clip_says_its_width_also_in_half_precision(bits: int, signed: bool, dtype: type) -> None:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    model = clipped(dtype(0.37) * dtype(low), dtype(0.37) * dtype(high), dtype(0.37), signed)
    index, chain, numbers = chain_of(model)
    assert read_clip_bits(index, chain, numbers) == bits
    assert is_quantizer_clip(index, chain, numbers)
    assert read_bits(index, chain, numbers, noted=None, levels=None) == (bits, Origin.CLIP)
    assert read_bits(index, chain, numbers, noted=(6, Origin.PLAN), levels=None) == (6, Origin.PLAN)
    assert read_bits(index, chain, numbers, noted=(9, Origin.PLAN), levels=None) == (bits, Origin.CLIP)


def clipped(low: np.floating, high: np.floating, scale: np.floating, signed: bool) -> onnx.ModelProto:
    kind = int(helper.np_dtype_to_tensor_dtype(scale.dtype))
    pair = models.pair("c", "d", names=("q", "dq"))
    text = f"[cast] h = Cast <to={kind}>(x) [clip] c = Clip(h, lo, hi) {pair} [back] y = Cast <to=1>(d)"
    return models.model(text, 19, lo=low, hi=high, s=scale, z=np.int8(0) if signed else np.uint8(0))


@pytest.mark.parametrize(("low", "high"), [(-8.0, 7.4), (-8.5, 7.0), (-128.0, 127.0), (0.0, 7.0), (7.0, -8.0)])
def test_a_clip_to_other_bounds_is_the_networks(low: float, high: float) -> None:
    model = clipped(np.float32(low), np.float32(high), np.float32(1), True)
    index, chain, numbers = chain_of(model)
    assert read_clip_bits(index, chain, numbers) is None
    assert not is_quantizer_clip(index, chain, numbers)
    assert find_pairs(model)[0].clip == ""


def test_a_narrow_range_of_the_whole_type_is_a_clip_of_the_quantizer() -> None:
    index, chain, numbers = chain_of(clipped(np.float32(-127), np.float32(127), np.float32(1), True))
    assert read_clip_bits(index, chain, numbers) == 8


def found(make):
    index = get_index(name_nodes(make()))
    return index, list(find_chains(index))


@pytest.mark.parametrize(
    ("noted", "site"),
    [
        ("conv/in1", Edge("conv", 1)),
        ("nobody/in1", TensorId("nobody/in1")),
        ("onnx::Conv_497", TensorId("onnx::Conv_497")),
        ("If_0.then_branch::x", TensorId("If_0.then_branch::x")),
        (None, TensorId("x")),
        ("", TensorId("x")),
    ],
)
def test_a_noted_site_is_read_with_the_scopes_of_the_model(noted: str | None, site: object) -> None:
    index, (first, *_) = found(models.two_widths)
    assert find_site(index, first, noted) == site


def test_a_scope_is_one_where_the_model_has_it() -> None:
    index, all_chains = found(models.branches)
    assert "If_0.then_branch" in index.scopes
    assert find_site(index, all_chains[0], "If_0.then_branch::onnx::x") == TensorId("onnx::x", "If_0.then_branch")


words = st.text(st.sampled_from("ab:/."), min_size=1, max_size=6)


@given(words, st.sets(words, max_size=4), words)
def test_what_str_writes_is_split_again(name: str, scopes: set[str], scope: str) -> None:
    """Names and scopes full of colons: the longest scope that the model has is taken."""
    text = str(TensorId(name, scope))
    got_scope, got_name = split_scope(text, scopes | {scope})
    assert str(TensorId(got_name, got_scope)) == text
    assert len(got_scope) >= len(scope)
    assert split_scope(name, ()) == ("", name)


@pytest.mark.parametrize(
    ("scope", "outer", "inside"),
    [("", "", True), ("a", "", True), ("a", "a", True), ("a/b", "a", True), ("ab", "a", False), ("a", "a/b", False)],
)
def test_scopes_within_each_other(scope: str, outer: str, inside: bool) -> None:
    assert is_within(scope, outer) is inside
