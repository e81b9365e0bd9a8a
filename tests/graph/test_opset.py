"""Opset upgrades keep names, metadata, weights and numbers; what cannot be converted is named."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError
from onnxq.graph import ensure_opset, find_opset, name_nodes, verify_graph
from onnxq.graph.convert import limit_opset
from onnxq.graph.values import encode_tensor
from tests.graph.kit import all_nodes, assert_same, compute, copy, model, models

F = np.float32


def old(opset: int) -> ModelProto:
    rng = np.random.default_rng(0)
    vectors = {name: rng.uniform(0.5, 1.5, 4).astype(F) for name in "somv"}
    text = """g (float[1,3,8,8] x) => (float[1,24] y) {
        [c] a = Conv<pads = [1,1,1,1]>(x, w) [b] b = BatchNormalization<epsilon = 0.001>(a, s, o, m, v)
        [r] r = Clip<min = 0.0, max = 6.0>(b) [p] p = Pad<pads = [0,0,1,1,0,0,1,1]>(r)
        [q] q = ReduceMean<axes = [2], keepdims = 0>(p) [u] u = Unsqueeze<axes = [1]>(q) [t] t = Squeeze<axes = [1]>(u)
        [k] k = Slice<axes = [2], starts = [0], ends = [6]>(t) [h1] h1, h2 = Split<axis = 2>(k)
        [j] j = Concat<axis = 2>(h2, h1) [e] e, i = TopK<axis = 2, k = 6>(j) [g] g = ReduceSum<axes = [1]>(e)
        [l] l = Add(e, g) [d] d = Dropout<ratio = 0.5>(l) [f] f = Softmax<axis = 2>(d)
        [y] y = Flatten(f) }"""
    proto = model(text, opset=opset, ir=4, w=rng.standard_normal((4, 3, 3, 3)).astype(F), **vectors)
    proto.metadata_props.add(key="k", value="v")
    return proto


FEEDS = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(F)}


@pytest.mark.parametrize("opset", [7, 9])
@pytest.mark.parametrize("target", [11, 13, 17, 18, 20, 21])
def test_old_models_compute_the_same_at_any_opset(opset: int, target: int) -> None:
    result = ensure_opset(old(opset), target)
    assert find_opset(result) == target
    verify_graph(result)
    assert {node.name for node in old(opset).graph.node} <= {node.name for node in result.graph.node}
    assert list(result.graph.output) == list(old(opset).graph.output)
    np.testing.assert_allclose(compute(result, FEEDS)[0], compute(old(opset), FEEDS)[0], rtol=1e-6, atol=1e-7)


@given(models(named=False), st.sampled_from([18, 20, 21]))
def test_random_models_with_bodies_keep_their_numbers(proto: ModelProto, target: int) -> None:
    named = name_nodes(proto)
    result = ensure_opset(named, target)
    assert find_opset(result) == target
    assert [node.name for node in all_nodes(result)] == [node.name for node in all_nodes(named)]
    assert_same(named, result)


def test_a_new_enough_model_is_left_alone() -> None:
    proto = name_nodes(old(9))
    assert ensure_opset(proto, 9) == proto
    assert ensure_opset(proto, 7) == proto


def test_everything_the_converter_drops_is_put_back() -> None:
    text = "g (float[4] x) => (float[4] y) { [n] a = Add(x, w) [m] y = Relu(a) }"
    four = encode_tensor("four", np.arange(3), TensorProto.INT4)
    proto = model(text, w=np.ones(5000)[:4], big=np.arange(5000, dtype=F), four=four)
    proto.graph.initializer[1].metadata_props.add(key="big", value="v")
    for holder in (proto, proto.graph, proto.graph.node[0], proto.graph.initializer[0], proto.graph.input[0]):
        holder.metadata_props.add(key="k", value="v")
    proto.graph.node[0].doc_string = proto.graph.doc_string = proto.doc_string = "about"
    proto.producer_name, proto.model_version = "maker", 3
    proto.graph.quantization_annotation.add(tensor_name="a")
    result = ensure_opset(proto, 19)
    expected = copy(proto)
    expected.opset_import[0].version = 19
    expected.ir_version = 9
    del result.graph.value_info[:]
    assert sorted(t.name for t in result.graph.initializer) == ["big", "four", "w"]
    by_name = {t.name: t for t in proto.graph.initializer}
    assert all(t == by_name[t.name] for t in result.graph.initializer)
    del result.graph.initializer[:], expected.graph.initializer[:]
    assert result == expected


def test_functions_are_kept_and_still_called() -> None:
    proto = model(
        """g (float[4] x) => (float[4] y) { [f] y = loc.F(x) }
        <domain: "loc", opset_import: ["": 17]> F (a) => (b) { t = Relu(a) b = Neg(t) }"""
    )
    result = ensure_opset(proto, 18)
    assert len(result.functions) == 1
    np.testing.assert_array_equal(compute(result)[0], compute(name_nodes(proto))[0])


def test_a_node_that_becomes_another_operator_keeps_its_name() -> None:
    text = 'g (float[1,1,4,4] x) => (float[1,1,8,8] y) { [up] y = Upsample<mode = "nearest">(x, s) }'
    proto = model(text, opset=9, ir=4, s=np.array([1, 1, 2, 2], F))
    proto.graph.node[0].metadata_props.add(key="k", value="v")
    result = ensure_opset(proto, 13)
    verify_graph(result)
    node = next(node for node in result.graph.node if node.name == "up")
    assert node.op_type == "Resize"
    assert node.metadata_props == proto.graph.node[0].metadata_props
    feeds = {"x": np.arange(16, dtype=F).reshape(1, 1, 4, 4)}
    np.testing.assert_array_equal(compute(result, feeds)[0], compute(proto, feeds)[0])


def test_what_the_converter_adds_is_named_after_the_node_it_serves() -> None:
    text = """g (float[2,3] x, bool c) => (float[2,3] y, float[3,2] _v_5) {
        [p] u = Unsqueeze<axes = [0]>(x) [q] k = Squeeze<axes = [0]>(u)
        [i] y = If(c) <then_branch = t () => (float[2,3] b) {
                           [n] a = Unsqueeze<axes = [0]>(k)
                           [m] b = Squeeze<axes = [0]>(a) },
                       else_branch = e () => (float[2,3] b) {
                           [o] a = Unsqueeze<axes = [1]>(k)
                           [r] b = Squeeze<axes = [1]>(a) }>
        [z] _v_5 = Transpose(y) }"""
    proto = model(text, opset=11)
    result = ensure_opset(proto, 13)
    verify_graph(result)
    added = {node.output[0] for node in all_nodes(result) if node.op_type == "Constant"}
    assert added == {f"{name}/Constant" for name in "pqnmor"}
    for flag in (True, False):
        feeds = {"x": np.arange(6, dtype=F).reshape(2, 3), "c": np.array(flag)}
        np.testing.assert_array_equal(compute(result, feeds)[0], compute(proto, feeds)[0])


def test_softmax_over_several_axes_keeps_its_meaning() -> None:
    proto = model("g (float[N,C,L] x) => (float[A,B,D] y) { [r] a = Relu(x) [s] y = Softmax(a) }", opset=11)
    result = ensure_opset(proto, 13)
    verify_graph(result)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(F)}
    np.testing.assert_allclose(compute(result, feeds)[0], compute(proto, feeds)[0], rtol=1e-6)


def test_an_operator_without_a_successor_is_named() -> None:
    proto = model("g (float[4] x) => (float[4] y) { [odd] y = Relu(x) }", opset=11)
    proto.graph.node[0].op_type = "Scatter"
    proto.graph.node[0].input.extend(["x", "x"])
    with pytest.raises(ModelError, match=r"Scatter.*\[Q109\]"):
        ensure_opset(proto, 13)


def test_a_failing_converter_is_named_with_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Unsupported conversion of Relu\nmore")

    monkeypatch.setattr(onnx.version_converter, "convert_version", refuse)
    proto = model("g (float[4] x) => (float[4] y) { [r] y = Relu(x) }", opset=11)
    with pytest.raises(ModelError, match=r"opset 11 to 13: .*conversion of Relu \(such nodes: r\)"):
        ensure_opset(proto, 13)


# Their defaults became others, which agree where a map is doubled without interpolation.
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("opset", "node"),
    [
        (7, "Upsample<mode = '{}', scales = [1., 1., 1.75, 3.]>(x)"),
        (9, "Upsample<mode = '{}'>(x, s)"),
        (10, "Resize<mode = '{}'>(x, s)"),
    ],
)
def test_maps_grow_as_the_old_operators_let_them(opset: int, node: str, mode: str) -> None:
    text = f"g (float[1,2,4,5] x) => (float[1,2,7,15] y) {{ y = {node.format(mode)} }}".replace("'", '"')
    scales = {} if opset == 7 else {"s": np.array([1, 1, 1.75, 3], F)}
    proto = name_nodes(model(text, opset=opset, ir=4, **scales))
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(F)}
    for newer in (11, 21):
        before, after = (compute(one, feeds)[0] for one in (proto, ensure_opset(proto, newer)))
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.recent_ort
def test_a_newer_model_is_lowered_with_the_same_numbers() -> None:
    text = "g (float[2,8] x) => (float[2,8] y) { [m] a = MatMul(x, w) [c] b = Celu(a) [t] y = Cast<to = 1>(b) }"
    proto = model(text, opset=28, ir=10, w=np.random.default_rng(0).standard_normal((8, 8)).astype(F))
    result = limit_opset(proto, 27)
    assert find_opset(result) == 27
    assert [node.name for node in result.graph.node] == ["m", "c", "t"]
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(F)}
    np.testing.assert_array_equal(compute(result, feeds)[0], compute(proto, feeds)[0])
    assert limit_opset(proto, 28) is proto


def test_what_cannot_be_lowered_is_told_with_the_opset_to_export_at() -> None:
    proto = model("g (float[2,8] x) => (float[2,8] y) { [s] y = CumProd(x, a) }", opset=28, ir=10, a=np.array(1))
    with pytest.raises(ModelError, match="opset 28 to 25") as caught:
        limit_opset(proto, 25)
    assert caught.value.cause == "onnx cannot convert the model: No Previous Version of CumProd exists (such nodes: s)"
    assert caught.value.fix.startswith("export it at opset 25, or take a newer onnxruntime")


def test_reasons_quote_no_source_of_the_converter() -> None:
    text = 'g (int16[4] x, int16[4] s) => (int16[4] y) { [b] y = BitShift<direction = "LEFT">(x, s) }'
    proto = model(text, opset=28, ir=10)
    with pytest.raises(ModelError, match=r"onnx cannot convert the model: DataType .* 'BitShift'.*such nodes: b"):
        limit_opset(proto, 27)


def test_a_scan_of_opset_8_is_refused_since_the_converter_forgets_its_batch() -> None:
    proto = model(
        """g (float[1,2] s, float[1,3,2] x) => (float[1,2] t, float[1,3,2] y) { [scan] t, y = Scan<num_scan_inputs = 1,
            body = b (float[2] a, float[2] c) => (float[2] d, float[2] e) { d = Add(a, c) e = Abs(d) }>("", s, x) }""",
        opset=8, ir=3,
    )  # fmt: skip
    with pytest.raises(ModelError, match="has batches") as caught:
        ensure_opset(name_nodes(proto), 13)
    assert caught.value.fix == "export the model at opset 9 or newer"
