"""All passes together: the same function, deterministic bytes, names and interface kept, every pass optional."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper, numpy_helper

from onnxq.graph import GraphIndex, find_opset, infer_shapes
from onnxq.passes.base import always
from onnxq.passes.patterns import NEWEST
from onnxq.passes.registry import REWRITES
from onnxq.runtime import optimize_graph
from tests.passes.kit import assert_same, feeds_for, in_branch, infer, ops, parse, prepared, rewrite_model

F = np.float32
# But those for targets that take whole graphs.
PASSES = tuple(entry for entry in REWRITES if entry.applies is always or entry.name == "upsampling")


def values(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "stem": rng.standard_normal((8, 3, 3, 3)).astype(F) / 5,
        "gamma": rng.uniform(0.5, 2, 8).astype(F),
        "beta": rng.standard_normal(8).astype(F),
        "mean": rng.standard_normal(8).astype(F),
        "var": rng.uniform(0.5, 2, 8).astype(F),
        "depth": rng.standard_normal((8, 1, 3, 3)).astype(F) / 3,
        "point": rng.standard_normal((8, 8, 1, 1)).astype(F) / 3,
        "head": rng.standard_normal((8, 5)).astype(F),
        "off": rng.standard_normal(5).astype(F),
        "amounts": np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        "slope": np.full((8, 1, 1), 0.2, F),
        "three": np.full(1, 3, F),
        "zero": np.asarray(F(0)),
        "six": np.asarray(F(6)),
        "sixes": np.full(1, 6, F),
        "a": np.full(1, 1.4, F),
        "b": np.full(1, 0.6, F),
        "one": np.full(1, 1, F),
        "half": np.asarray(F(0.5)),
        "root": np.asarray(F(np.sqrt(2))),
    }


NETWORK = """g (float[N,3,9,9] x) => (float[N,5] y) {
    p0 = Pad(x, amounts) c0 = Conv <kernel_shape = [3,3], strides = [2,2]> (p0, stem)
    n0 = BatchNormalization (c0, gamma, beta, mean, var)
    e0 = Erf(d0) t0 = Add(e0, one) m0 = Mul(n0, t0) g0 = Mul(m0, half)
    c1 = Conv <kernel_shape = [3,3], pads = [1,1,1,1], group = 8> (g0, depth) s1 = Mul(a, c1) f1 = Add(s1, b)
    h1 = Add(f1, three) k1 = Clip(h1, zero, six) m1 = Mul(f1, k1) w1 = Div(m1, sixes)
    l1 = Mul(w1, a) o1 = Add(l1, b) c2 = Conv <kernel_shape = [1,1]> (o1, point)
    u2 = Mul(c2, one) v2 = Sigmoid(u2) w2 = Mul(c2, v2) r2 = PRelu(w2, slope) i2 = Identity(r2)
    q2 = ReduceMean <axes = [2,3], keepdims = 0> (i2) z2 = Dropout(q2) j2 = MatMul(z2, head) y = Add(j2, off)
}""".replace("e0 = Erf", "d0 = Div(n0, root) e0 = Erf")


def network(opset: int = 13, seed: int = 0) -> ModelProto:
    return parse(NETWORK, opset=opset, **values(seed))


@pytest.fixture(scope="module")
def done() -> ModelProto:
    return prepared(network())


def test_a_network_of_everything_changes_once_and_for_all() -> None:
    model = network()
    before = model.SerializeToString(deterministic=True)
    result = rewrite_model(model)
    assert model.SerializeToString(deterministic=True) == before
    single = ("Gelu", "HardSwish", "QuickGelu", "LeakyRelu", "GlobalAveragePool", "Flatten", "MatMul", "Add")
    assert ops(result.proto) == {"Conv": 3, **dict.fromkeys(single, 1)}
    assert find_opset(result.proto) == 20
    onnx.checker.check_model(result.proto)
    assert_same(model, result.proto, rtol=1e-5)
    assert [report.name for report in result.reports] == [entry.name for entry in PASSES]
    fired = {report.name for report in result.reports if report.changed}
    assert fired == {"dead", "activations", "prelu", "pool", "pad", "batchnorm", "scalars"}
    # The same bytes every time, and nothing more is found in what came out.
    once = result.proto.SerializeToString(deterministic=True)
    assert prepared(model).SerializeToString(deterministic=True) == once
    twice = rewrite_model(result.proto)
    assert not any(report.changed for report in twice.reports)
    assert twice.proto.SerializeToString(deterministic=True) == once


@settings(max_examples=15)
@given(st.sets(st.sampled_from([entry.name for entry in PASSES])), st.integers(0, 99), st.booleans())
def test_any_choice_of_passes_keeps_the_function(skip: set[str], seed: int, inside: bool) -> None:
    model = network(17, seed)
    model = in_branch(model) if inside else model
    result = rewrite_model(model, skip=frozenset(skip))
    assert {report.name for report in result.reports} == {entry.name for entry in PASSES} - skip
    assert_same(model, result.proto, rtol=2e-5, seed=seed)


def test_what_keeps_its_name_keeps_its_value(done: ModelProto) -> None:
    """Every tensor of both models, main graph, is the same number in both."""
    model = network()
    index = GraphIndex(model)
    written = [name for node in GraphIndex(done).nodes for name in node.outputs]
    common = [name for name in written if index.resolve_tensor(name, "") is not None]
    assert len(common) > 6
    feeds = feeds_for(model)
    outputs = []
    for proto in (model, done):
        probe = ModelProto.FromString(proto.SerializeToString())
        del probe.graph.output[:]
        probe.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in common)
        outputs.append(infer(probe, feeds))
    for name, old, new in zip(common, *outputs, strict=True):
        assert old.shape == new.shape, name
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * max(1, float(np.abs(old).max())), err_msg=name)


def test_weights_behind_nodes() -> None:
    text = """g (float[N,3,9,9] x) => (float[N,8,7,7] y) {
        t = Cast <to = 1> (w16) u = Transpose <perm = [3,2,0,1]> (t) v = Identity(u)
        y = Conv <kernel_shape = [3,3]> (x, v) }"""
    weight = np.random.default_rng(0).standard_normal((3, 3, 3, 8)).astype(np.float16)
    model = parse(text, w16=weight)
    result = rewrite_model(model)
    assert ops(result.proto) == {"Conv": 1}
    (stored,) = result.proto.graph.initializer
    assert numpy_helper.to_array(stored).shape == (8, 3, 3, 3)
    assert_same(model, result.proto)
    assert len(next(report for report in result.reports if report.name == "constants").changed) == 3


def test_pad_amounts_computed_in_the_graph() -> None:
    text = """g (float[N,3,9,9] x) => (float[N,8,9,9] y) {
        z = ConstantOfShape <value = int64[1] {0}> (four) k = Concat <axis = 0> (z, z) s = Reshape(k, flat)
        m = Add(s, ones) p = Pad(x, m, zero) y = Conv <kernel_shape = [3,3]> (p, w) }"""
    held = {
        "four": np.array([4]),
        "flat": np.array([-1]),
        "ones": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "zero": np.asarray(F(0)),
        "w": np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(F),
    }
    model = parse(text, **held)
    result = prepared(model)
    assert ops(result) == {"Conv": 1}
    assert_same(model, result)


def test_pairs_that_are_there_stay() -> None:
    text = """g (float[N,8,5,5] x) => (float[N,8,5,5] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear <axis = 0> (w, sw)
        c = Conv <kernel_shape = [1,1]> (d, v) m = Mul(c, a)
        o = QuantizeLinear(m, s, z) y = DequantizeLinear(o, s, z) }"""
    held = {
        "w": np.random.default_rng(0).integers(-63, 64, (8, 8, 1, 1)).astype(np.int8),
        "sw": np.full(8, 0.01, F),
        "s": np.asarray(F(0.05)),
        "z": np.uint8(100),
        "a": np.full(1, 1.4, F),
    }
    model = parse(text, **held)
    result = prepared(model)
    before, after = ([node.SerializeToString() for node in one.graph.node] for one in (model, result))
    assert after == before
    assert_same(model, result, rtol=0)


def test_unnamed_nodes_and_a_clash_of_names() -> None:
    model = network()
    for node in model.graph.node:
        node.name = ""
    taken = "c1/Conv/bias"  # what the folded bias would be called
    model.graph.node.add(op_type="Neg", input=["y"], output=[taken], name=taken)
    model.graph.output.add(name=taken, type=model.graph.output[0].type)
    result = prepared(model)
    assert_same(model, result, rtol=1e-5)


def test_inferred_types_do_not_reach_the_file(done: ModelProto) -> None:
    """ORT fuses by what it knows of shapes; the file tells it what it told before."""
    beyond = {name for node in done.graph.node if node.domain for name in node.output}
    assert {value.name for value in done.graph.value_info} == beyond  # QuickGelu, which onnx cannot infer
    index = GraphIndex(infer_shapes(done))
    assert all(
        index.find_shape(t) is not None for node in index.nodes if (t := index.resolve_tensor(node.outputs[0], ""))
    )
    told = infer_shapes(network())
    assert len(prepared(told).graph.value_info) > len(done.graph.value_info)


def test_the_opset_rises_no_further_than_needed() -> None:
    plain = parse("g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }", opset=11)
    assert find_opset(prepared(plain)) == 11
    newer = parse("g (float[N,4] x) => (float[N,4] y) { s = Sigmoid(x) y = Mul(x, s) }", opset=22)
    assert find_opset(prepared(newer)) == 22
    without = rewrite_model(network(), skip=frozenset({"activations"}))
    assert find_opset(without.proto) == 13
    assert NEWEST == 20


def test_the_prepared_network_is_loaded_and_fused(done: ModelProto) -> None:
    found = ops(optimize_graph(done))
    assert found["BatchNormalization"] == 0
    assert found["Pad"] == 0


def test_half_precision() -> None:
    held = {name: value.astype(np.float16) if value.dtype == F else value for name, value in values().items()}
    text = NETWORK.replace("float[", "float16[")
    model = parse(text, opset=17, **held)
    result = prepared(model)
    assert "BatchNormalization" not in ops(result)
    assert {value.type.tensor_type.elem_type for value in (*result.graph.input, *result.graph.output)} == {10}
    assert_same(model, result, rtol=2e-2)
