"""Constants folded: what must be, what must not, with which numbers; and integers that follow from static dims."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

import onnxq
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, fold_constants, infer_shapes, name_nodes, verify_graph
from onnxq.graph.folding.values import infer_shape_values, move_constant
from onnxq.graph.values import encode_tensor
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.graph.kit import assert_same, compute, model, models, shuffled

F = np.float32
W = np.random.default_rng(0).standard_normal((3, 4)).astype(F)


def fold(proto: ModelProto) -> GraphIndex:
    """Folded, legal, with the interface of before; the model given stays as it is."""
    before = proto.SerializeToString(deterministic=True)
    result = fold_constants(proto)
    verify_graph(result)
    assert proto.SerializeToString(deterministic=True) == before
    assert list(result.graph.input) == list(proto.graph.input)
    assert list(result.graph.output) == list(proto.graph.output)
    return GraphIndex(result)


def ops(index: GraphIndex) -> list[str]:
    return [node.op_type for node in index.nodes]


def initializer(index: GraphIndex, name: str, scope: str = "") -> np.ndarray:
    t = TensorId(name, scope)
    assert index.find_producer(t) is None
    return index.find_constant(t)


@settings(max_examples=60)
@given(models(named=False), st.integers(0, 99))
def test_random_models_keep_their_numbers(proto: ModelProto, seed: int) -> None:
    proto = name_nodes(shuffled(proto, seed))
    index = fold(proto)
    assert_same(proto, index.proto)
    for node in index.nodes:
        if node.op_type != "If":
            reads = [index.resolve_tensor(name, node.scope) for name in node.inputs]
            assert index.is_output(TensorId(node.outputs[0], node.scope)) or not all(
                index.is_constant(t) for t in reads if t is not None
            )
    assert fold_constants(index.proto) == index.proto


def test_constants_with_an_axis_are_reshaped_where_ort_wants_scalars() -> None:
    # Shape's first entry is folded here, and not by ORT: the other one is unknown.
    text = """g (float[4, N] x) => (float[4, N] y) {
        s = Shape(x)  d = Slice(s, zero1, one1)  r = Range(zero, d, one)  f = Cast<to = 1>(r)
        column = Reshape(f, shape)  y = Add(x, column) }"""
    numbers = {"zero1": [0], "one1": [1], "zero": 0, "one": 1, "shape": [4, 1]}
    proto = name_nodes(model(text, **{name: np.array(value, np.int64) for name, value in numbers.items()}))
    feeds = {"x": np.ones((4, 3), F)}
    folded = fold(proto)
    assert "Slice" not in ops(folded)
    assert ops(folded).count("Range") <= 1
    np.testing.assert_array_equal(compute(folded.proto, feeds)[0], compute(proto, feeds)[0])
    Session(folded.proto)
    assert fold_constants(folded.proto) == folded.proto


def test_a_computed_scalar_with_an_axis_is_reshaped_for_ort_may_fold_it() -> None:
    # ORT takes the branch once the condition is a constant, and then has a constant of shape [1].
    numbers = {"four1": [4], "one1": [1], "two1": [2], "zero": 0, "one": 1}
    text = """g (float[4] x, int64[4] sizes) => (float[4] y) {
            n = Size(sizes)  four = Size(x)  same = Equal(n, four)
            d = If(same) <then_branch = t () => (int64[1] a) { a = Identity(four1) },
                          else_branch = e () => (int64[1] b) { b = Slice(sizes, one1, two1) }>
            r = Range(zero, d, one)  f = Cast<to = 1>(r)  y = Add(x, f) }"""
    proto = name_nodes(model(text, **{name: np.array(value, np.int64) for name, value in numbers.items()}))
    feeds = {"x": np.ones(4, F), "sizes": np.array([1, 2, 3, 4])}
    folded = fold(proto)
    assert folded.input_value(folded.find_node("d/If"), 0) is not None
    (found,) = Session(folded.proto).run(feeds).values()
    np.testing.assert_array_equal(found, compute(proto, feeds)[0])


@pytest.mark.parametrize("wrap", ["Transpose", "Identity", "Cast<to = 1>", "Reshape", "Neg"])
def test_a_wrapped_weight_becomes_an_initializer(wrap: str) -> None:
    inner = "Reshape(w, shape)" if wrap == "Reshape" else f"{wrap}(w)"
    weight = W.T if wrap == "Transpose" else W.reshape(4, 3)
    expected = {"Transpose": weight.T, "Neg": -weight}.get(wrap, weight)
    proto = model(
        f"g (float[N,{expected.shape[0]}] x) => (float[N,{expected.shape[1]}] y) {{ v = {inner} y = MatMul(x, v) }}",
        w=weight.astype(np.float16) if wrap.startswith("Cast") else np.ascontiguousarray(weight),
        shape=np.array(weight.shape, np.int64),
    )
    index = fold(proto)
    assert ops(index) == ["MatMul"]
    name = index.nodes[0].inputs[1]
    assert name == ("w" if wrap == "Identity" else "v")
    found = initializer(index, name)
    assert found.dtype == F
    assert [t.name for t in index.proto.graph.initializer] == (["w", "shape"] if wrap == "Identity" else [name] if
                                                               wrap == "Reshape" else ["shape", name])  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=2e-3)
    if not wrap.startswith("Cast"):
        np.testing.assert_array_equal(found, expected)


def test_a_tied_weight_behind_identities_stays_one() -> None:
    text = "i = Identity(w) j = Identity(i) a = MatMul(x, i) b = MatMul(x, j) y = Add(a, b)"
    index = fold(model(f"g (float[3] x) => (float[4] y) {{ {text} }}", w=W))
    assert [t.name for t in index.proto.graph.initializer] == ["w"]
    assert len(index.list_consumers(TensorId("w"))) == 2


PADDING = """g (float[N,3,10,10] x) => (float[N,3,H,W] y) {
    shape = Shape(x) two = Constant<value_ints = [2]>() four = Constant<value_ints = [4]>()
    hw = Slice(shape, two, four) k = Constant<value_ints = [3, 3]>() rest = Mod(hw, k)
    zeros = ConstantOfShape<value = int64[1] {0}>(two) pads = Concat<axis = 0>(zeros, rest, zeros, rest)
    y = Pad(x, pads)
}"""

LONG = np.arange(1000) % 3
# By name: the text, its arrays, the operators that are left, and initializers of the folded model.
FOLDED: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "constant nodes of every kind": (
        """g (float[2] x) => (float[2] y, int64[2] k) {
        a = Constant<value_floats = [1.0, 2.0]>() b = Constant<value_float = 3.0>()
        c = Constant<value = float[2] {4.0, 5.0}>() d = Constant<value_ints = [6, 7]>()
        s = Add(x, a) t = Mul(s, b) y = Sub(t, c) n = Shape(y) k = Add(d, d2)
        d2 = Constant<value_ints = [6, 7]>() }""",
        {},
        "Add Mul Sub Add",
        {"b": F(3), "c": F([4, 5]), "d": np.array([6, 7])},
    ),
    "a constant that is an output stays": (
        """g (float[2] x) => (float[2] y, float[2] k) {
        c = Constant<value_floats = [1.0, 2.0]>() k = Neg(c) y = Add(x, k) }""",
        {},
        "Neg Add",
        {"c": F([1, 2])},
    ),
    "padding by static axes of a dynamic batch": (PADDING, {}, "Pad", {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
    # More bytes than the index without weights keeps: relative positions of attention are such vectors.
    "long indices are not read as shapes": (
        "g (float[3] x) => (float[1,1000] y) { k = Unsqueeze(long, zero) g = Gather(x, k) y = Relu(g) }",
        {"long": LONG, "zero": np.array([0])},
        "Gather Relu",
        {"k": LONG[None]},
    ),
    "quantized weights stay behind their dequantize": (
        """g (float[3] x) => (float[4] y) {
        t = Transpose(q) d = DequantizeLinear(t, s) a = MatMul(x, d)
        r = Neg(w) u = QuantizeLinear(r, s) e = DequantizeLinear(u, s) b = MatMul(x, e)
        y = Add(a, b) }""",
        {"q": np.ones((4, 3), np.int8), "s": 0.5, "w": W},
        "DequantizeLinear MatMul QuantizeLinear DequantizeLinear MatMul Add",
        {"t": np.ones((3, 4), np.int8), "r": -W},
    ),
    "chance is not folded": (
        """g (float[4] x) => (float[4] y) {
        r = RandomNormal<shape = [4]>() l = RandomUniformLike(w) s = Add(r, l) y = Add(x, s) }""",
        {"w": np.ones(4, F)},
        "RandomNormal RandomUniformLike Add Add",
        {},
    ),
    "other domains are left alone": (
        "g (float[4] x) => (float[4] y) { v = com.microsoft.Gelu(w) y = Add(x, v) }",
        {"w": np.ones(4)},
        "Gelu Add",
        {},
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_folded_and_what_stays(name: str) -> None:
    text, arrays, left, values = FOLDED[name]
    index = fold(name_nodes(model(text, **arrays)))
    assert ops(index) == left.split()
    for tensor, value in values.items():
        folded = initializer(index, tensor)
        assert folded.dtype == value.dtype
        np.testing.assert_array_equal(folded, value)


def test_stale_value_info_is_not_believed() -> None:
    """A model made dynamic by editing its input alone still claims batch 1 inside."""
    proto = model("g (float[N,3] x) => (int64[2] y) { a = Relu(x) s = Shape(a) y = Add(s, s) }")
    proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, 3]))
    assert ops(fold(proto)) == ["Relu", "Shape", "Add"]


@pytest.mark.parametrize("dtype", [TensorProto.BFLOAT16, TensorProto.INT4, TensorProto.UINT4])
def test_types_numpy_does_not_know_are_unpacked(dtype: int) -> None:
    """ORT cannot hand these back; moving them needs no engine."""
    values = np.arange(6).reshape(2, 3)
    follow = "Cast<to = 1>(r)" if dtype == TensorProto.BFLOAT16 else "DequantizeLinear(r, s)"
    proto = model(
        f"g (float[N,6] x) => (float[N,1] y) {{ t = Transpose(w) r = Reshape(t, k) f = {follow} y = MatMul(x, f) }}",
        opset=21,
        ir=10,
        s=1.0,
        k=np.array([6, 1]),
        w=encode_tensor("w", values, dtype),
    )
    index = fold(name_nodes(proto))
    found = initializer(index, "f" if dtype == TensorProto.BFLOAT16 else "r")
    np.testing.assert_array_equal(found.astype(F), values.T.reshape(6, 1))
    np.testing.assert_array_equal(compute(index.proto, {"x": np.eye(6, dtype=F)})[0], values.T.reshape(6, 1).astype(F))


def test_weights_packed_into_four_bits_stay_packed() -> None:
    body = """w = Cast <to = 3> (packed) d = DequantizeLinear <axis = 0> (w, scale, zero) a = MatMul(x, d)
    other = Cast <to = 1> (packed) y = Add(a, other)"""
    packed = encode_tensor("packed", np.arange(12).reshape(3, 4).astype(np.int8) - 6, TensorProto.INT4)
    weights = {"scale": np.ones(3, F), "zero": np.zeros(3, np.int8), "packed": packed}
    index = fold(model(f"g (float[3,3] x) => (float[3,4] y) {{ {body} }}", opset=21, **weights))
    # Bytes for the DequantizeLinear are made when the file is loaded; other uses of the weight fold as ever.
    assert sorted(ops(index)) == ["Add", "Cast", "DequantizeLinear", "MatMul"]
    assert index.find_dtype(TensorId("packed", "")) == TensorProto.INT4
    assert initializer(index, "other").tolist() == (np.arange(12.0).reshape(3, 4) - 6).tolist()


def test_what_would_blow_up_the_model_stays() -> None:
    text = """g (float[N] x) => (float[2000,2000] y) {
        n = Concat<axis = 0>(k, k) big = ConstantOfShape<value = float[1] {1.0}>(n)
        small = ConstantOfShape<value = float[1] {1.0}>(k) e = Expand(small, n) t = ReduceSum<keepdims = 0>(x)
        u = Mul(big, t) y = Add(u, e) }"""
    index = fold(model(text, k=np.array([2000])))
    assert sorted(ops(index)) == ["Add", "ConstantOfShape", "Expand", "Mul", "ReduceSum"]
    np.testing.assert_array_equal(initializer(index, "n"), [2000, 2000])
    assert initializer(index, "small").shape == (2000,)


def test_one_node_ort_cannot_run_does_not_keep_others_from_folding() -> None:
    text = """g (float[3] x) => (float[4] y) {
        v = Transpose(w) j = Add(i, i) c = Min(j, j) f = Cast<to = 1>(c) m = MatMul(x, v) y = Add(m, f) }"""
    index = fold(name_nodes(model(text, w=np.ascontiguousarray(W.T), i=np.array([1], np.uint16))))
    assert sorted(ops(index)) == ["Add", "Cast", "MatMul", "Min"]
    np.testing.assert_array_equal(initializer(index, "v"), W)
    np.testing.assert_array_equal(initializer(index, "j"), [2])


def test_bodies_fold_in_their_own_scope() -> None:
    text = """g (float[3] x, bool c) => (float[4] y) {
        [i] y = If(c) <then_branch = t () => (float[4] b) { [n] v = Transpose(w) [m] b = MatMul(x, v) },
                       else_branch = e () => (float[4] b) { [p] v = Neg(k) [k] k0 = Constant<value = float[1] {2.0}>()
                            [q] a = MatMul(x, u) [r] z = Add(a, v) [s] b = Mul(z, k0) }>
    }"""
    proto = model(text, w=np.ascontiguousarray(W.T), u=W, k=np.ones(4, F))
    index = fold(proto)
    assert [node.op_type for node in index.nodes] == ["MatMul", "MatMul", "Add", "Mul", "If"]
    np.testing.assert_array_equal(initializer(index, "v", "i.then_branch"), W)
    np.testing.assert_array_equal(initializer(index, "v", "i.else_branch"), -np.ones(4))
    for flag in (True, False):
        feeds = {"x": np.ones(3, F), "c": np.array(flag)}
        np.testing.assert_array_equal(compute(index.proto, feeds)[0], compute(proto, feeds)[0])


def test_bodies_that_unpack_one_weight_share_it() -> None:
    text = """g (float[40] x, bool c) => (float[60] y) {
        [i] y = If(c) <then_branch = t () => (float[60] b) { [n] v = Transpose(w) [m] b = MatMul(x, v) },
                       else_branch = e () => (float[60] b) { [p] v = Transpose(w) [q] a = MatMul(x, v) [r] b = Neg(a) }>
    }"""
    index = fold(model(text, w=np.random.default_rng(0).standard_normal((60, 40)).astype(F)))
    assert [t.name for t in index.proto.graph.initializer] == ["v"]
    assert len(index.list_consumers(TensorId("v"))) == 2


def test_names_metadata_and_narrow_weights_survive() -> None:
    text = "g (float[4] x) => (float[4] y) { [a] v = Neg(w) [b] y = Add(x, v) }"
    four = encode_tensor("four", np.arange(5), TensorProto.INT4)
    proto = model(text, opset=21, ir=10, w=np.ones(4), four=four)
    proto.metadata_props.add(key="k", value="v")
    proto.graph.node[1].metadata_props.add(key="n", value="m")
    result = fold(proto).proto
    assert result.metadata_props == proto.metadata_props
    assert result.graph.node[0] == proto.graph.node[1]
    assert result.graph.initializer[0] == proto.graph.initializer[1]


def test_weights_in_constant_nodes_keep_their_bytes() -> None:
    text = "g (float[4] x) => (float[4] y) { [d] d = DequantizeLinear(four, s) [r] y = Relu(d) }"
    proto = model(text, opset=21, ir=10, s=1.0)
    tensor = encode_tensor("any", np.arange(5), TensorProto.INT4)
    tensor.metadata_props.add(key="k", value="v")
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["four"], "four", value=tensor))
    found = fold(proto).proto.graph.initializer[-1]
    assert (found.name, found.raw_data, found.metadata_props) == ("four", tensor.raw_data, tensor.metadata_props)


def test_nothing_is_written_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    fold_constants(model(PADDING))
    assert capfd.readouterr() == ("", "")


def test_a_transpose_of_another_rank_is_left_to_the_engine() -> None:
    text = "g (float[N,3] x) => (float[N,4] y) { t = Transpose<perm = [0, 2, 1]>(w) y = MatMul(x, t) }"
    assert move_constant(GraphIndex(name_nodes(model(text))).nodes[0], W, TensorProto.FLOAT, None) is None


def test_a_cast_to_an_attribute_of_no_function_is_left_to_the_engine() -> None:
    proto = model("g (float[N,3] x) => (float[N,4] y) { [t] t = Cast<to: int = @kind>(w) [m] y = MatMul(x, t) }", w=W)
    with pytest.raises(ModelError, match="'t'"):
        onnxq.quantize(proto, {"x": np.ones((2, 3), F)}, overrides={"effort": "fast", "latency": False})


def test_inputs_of_a_loop_may_hide_the_constants_that_they_begin_with() -> None:
    """As Paddle's exporter names what a Loop carries."""
    text = """g (float[4] x, float[4] z, bool c) => (float[4] y) {
        trips = Constant <value = int64 {2}> () b = Constant <value = float {1.5}> () s = Add(x, z)
        y, last = Loop(trips, c, s, b) <body = step (int64 i, bool on, float[4] a, float b)
            => (bool more, float[4] d, float e) { more = Identity(on) d = Add(a, b) e = Add(b, b) }>
    }"""
    proto = model(text)
    folded = fold(proto)
    assert initializer(folded, "b") == F(1.5)
    assert_same(proto, folded.model)


NUMBERS = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "zeros": np.array([0]), "ones": np.array([1]),
    "twos": np.array([2]), "minus": np.array([-1]), "far": np.array([2**40]), "places": np.array([3, 1]),
    "below": np.array([-(2**40)]),
}  # fmt: skip


def graph(nodes: str, shape: str = "N,3,H,5", **arrays: Any) -> onnx.ModelProto:
    proto = model(f"g (float[{shape}] x) => (float[{shape}] y) {{ {nodes} y = Relu(x) }}", **NUMBERS, **arrays)
    return infer_shapes(name_nodes(proto))


def known(nodes: str, **arrays: Any) -> dict[str, list[int] | int]:
    found = infer_shape_values(GraphIndex(graph(nodes, **arrays)))
    return {tensor.name: value.tolist() for tensor, value in found.items()}


@pytest.mark.parametrize(
    ("nodes", "value"),
    [
        pytest.param("k = Shape<start=1, end=2>(x)", [3], id="part of a shape"),
        pytest.param("s = Shape(x) k = Gather(s, places)", [5, 3], id="Gather of static axes"),
        pytest.param("s = Shape(x) k = Gather(s, minus)", [5], id="Gather from the end"),
        pytest.param("s = Shape(x) k = Gather(s, one)", 3, id="Gather of one number"),
        pytest.param("s = Shape(x) k = Slice(s, ones, twos)", [3], id="Slice"),
        pytest.param("s = Shape(x) k = Slice(s, minus, far, zeros)", [5], id="Slice to beyond the end"),
        pytest.param("s = Shape<start=3>(x) k = Slice(s, minus, below, zeros, minus)", [5], id="Slice backwards"),
        pytest.param("s = Shape(x) g = Gather(s, one) k = Unsqueeze(g, zeros)", [3], id="Unsqueeze"),
        pytest.param("s = Shape<start=3>(x) k = Squeeze(s, zeros)", 5, id="Squeeze"),
        pytest.param("s = Shape<start=3>(x) k = Squeeze(s)", 5, id="Squeeze without axes"),
        pytest.param("s = Shape<start=3>(x) k = Concat<axis=0>(minus, s, twos)", [-1, 5, 2], id="Concat"),
        pytest.param("s = Shape<start=3>(x) k = Cast<to=6>(s)", [5], id="Cast to int32"),
        pytest.param("s = Shape<start=3>(x) k = Identity(s)", [5], id="Identity"),
        pytest.param("e = Expand(one, places) k = Size(e)", 3, id="Size"),
    ],
)
def test_static_entries_are_followed(nodes, value):
    assert known(nodes)["k"] == value


@pytest.mark.parametrize("nodes", [
    pytest.param("k = Shape(x)", id="a dynamic axis"),
    pytest.param("k = Size(x)", id="Size with a dynamic axis"),
    pytest.param("s = Shape(x) k = Gather(s, zeros)", id="Gather of a dynamic axis"),
    pytest.param("s = Shape(x) k = Slice(s, zeros, twos)", id="Slice with a dynamic axis"),
    pytest.param("s = Shape(x) k = Concat<axis=0>(ones, s)", id="Concat with a dynamic axis"),
    pytest.param("s = Shape<start=3>(x) k = Cast<to=1>(s)", id="Cast to float"),
    pytest.param("s = Shape<start=3>(x) k = Mul(s, twos)", id="arithmetic, which is folded elsewhere"),
    pytest.param("s = Shape(x) n = NonZero(x) k = Gather(s, n)", id="at places of the run"),
    pytest.param("k = Identity(ones)", id="a value of constants alone, which needs no shape to be known")
])  # fmt: skip
def test_what_hangs_on_a_dynamic_axis_is_not_told(nodes):
    found = known(nodes)
    if "Identity" in nodes:
        # Told or folded, never another value.
        assert found.get("k", [1]) == [1]
    else:
        assert "k" not in found


def test_long_vectors_are_data_and_not_followed():
    long = {"values": np.arange(65), "short": np.arange(64)}
    found = known("k = Identity(values) l = Identity(short) m = Concat<axis=0>(l, ones)", **long)
    assert "k" not in found
    assert "m" not in found


def test_values_have_the_type_of_their_tensor():
    found = infer_shape_values(GraphIndex(graph("s = Shape<start=3>(x) k = Cast<to=6>(s)")))
    assert (found[TensorId("s")].dtype, found[TensorId("k")].dtype) == (np.int64, np.int32)
    # A number too large for int32 would come out as another one.
    large = infer_shape_values(GraphIndex(graph("c = Concat<axis=0>(far, far) k = Cast<to=6>(c)")))
    assert TensorId("k") not in large


STEPS = st.sampled_from(
    ["Gather({}, zeros)", "Gather({}, minus)", "Gather({}, places)", "Slice({}, ones, far)", "Slice({}, zeros, minus)",
     "Slice({}, minus, below, zeros, minus)", "Concat<axis=0>({}, twos)", "Concat<axis=0>({}, {})", "Cast<to=6>({})",
     "Cast<to=7>({})", "Identity({})"]
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=5), st.sampled_from([(1, 2), (4, 7)]))
def test_every_value_told_is_the_one_computed(steps, sizes):
    nodes = ["t0 = Shape(x)"]
    for k, step in enumerate(steps):
        # Concat takes one type only.
        front = f"c{k} = Cast<to=7>(t{k}) " if "Concat" in step else ""
        name = f"c{k}" if front else f"t{k}"
        nodes.append(f"{front}t{k + 1} = {step.format(name, name)}")
    proto = graph(" ".join(nodes))
    found = infer_shape_values(GraphIndex(proto))
    if not found:
        return
    session = Session(tap_tensors(proto, list(found), only=True).proto, optimize=False)
    try:
        values = session.run({"x": np.zeros((sizes[0], 3, sizes[1], 5), np.float32)}, [one.name for one in found])
    except Exception:
        # `places` asks for more entries than there are: nothing to compare.
        return
    for tensor, value in found.items():
        np.testing.assert_array_equal(value, values[tensor.name])
