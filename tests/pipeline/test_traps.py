"""Models on which other quantizers fail without a word; each trap was measured on one of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxq
from onnxq.config import Config, Rule
from onnxq.errors import CalibrationError, DataError
from onnxq.runtime import Session, optimize_graph

EVERYTHING = Config(rules=(Rule(op="*", set={"quantize": True}),))  # type: ignore[arg-type]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Weights do not depend on which tests ran before."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def build(text: str, arrays: dict[str, np.ndarray], opset: int = 17) -> onnx.ModelProto:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    return proto


def normal(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)


def images(count: int = 8, channels: int = 32, size: int = 8) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(3).standard_normal((count, channels, size, size)).astype(np.float32)}


CONVS = """g (float[N,32,8,8] x) => (float[N,32,8,8] y) {
    a = Conv <pads=[1,1,1,1]>(x, w)
    r = Relu(a)
    y = Conv <pads=[1,1,1,1]>(r, v)
}"""


def kernels(result: onnxq.Result) -> Counter[str]:
    return Counter(node.op_type for node in optimize_graph(result.model).graph.node)


def good(result: onnxq.Result, least: float = 28.0) -> None:
    """The answers are the float model's, with ORT's optimizations off and on."""
    assert result.report.checks
    for check in result.report.checks:
        assert min(check.sqnr_db) > least, check
        assert check.agreement_db > 35, check


def test_names_that_are_taken_are_not_reused() -> None:
    """A user's own tensor called like our scale must not become the scale (elsewhere: 0.01 dB)."""
    proto = build(
        """g (float[N,32,8,8] x) => (float[N,32,8,8] y) {
            a = Conv <pads=[1,1,1,1]>(x, w)
            b = Mul(a, "r/scale")
            r = Relu(b)
            y = Conv <pads=[1,1,1,1]>(r, v)
        }""".replace('"r/scale"', "s"),
        {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3), "s": np.abs(normal(32, 1, 1)) + 0.5},
    )
    taken = {"s": "r/scale"}
    for node in proto.graph.node:
        node.input[:] = [taken.get(name, name) for name in node.input]
    next(t for t in proto.graph.initializer if t.name == "s").name = "r/scale"
    proto.graph.node[0].name = "r/QuantizeLinear"
    config = Config(skip=("scalars",), rules=EVERYTHING.rules)
    result = onnxq.quantize(proto, images(), config, overrides={"latency": False})
    good(result)
    names = Counter(node.name for node in result.model.graph.node)
    assert max(names.values()) == 1
    kept = {t.name: numpy_helper.to_array(t) for t in result.model.graph.initializer}
    np.testing.assert_array_equal(kept["r/scale"], numpy_helper.to_array(proto.graph.initializer[2]))


@pytest.mark.parametrize("embeddings", ["float", "int8"])
def test_tied_embedding_quantizes_the_head(embeddings: str) -> None:
    """Gather and Gemm on one table, with a copy for the Gemm or without (elsewhere: a model that fails at run time)."""
    table = normal(500, 64)
    proto = build(
        """g (int64[N] ids) => (float[N,500] y) {
            e = Gather(table, ids)
            y = Gemm <transB=1>(e, table, b)
        }""",
        {"table": table, "b": normal(500)},
    )
    ids = np.random.default_rng(0).integers(0, 500, (8, 16))
    settings = {"latency": False, "embeddings": embeddings}
    result = onnxq.quantize(proto, {"ids": ids.reshape(-1)}, EVERYTHING, overrides=settings)
    good(result)
    assert kernels(result)["QGemm"] == 1
    held = {t.name: t.data_type for t in result.model.graph.initializer if t.dims == [500, 64]}
    assert held.get("table") == (TensorProto.FLOAT if embeddings == "float" else None)
    assert held["table/quantized"] == TensorProto.INT8


def test_one_weight_on_two_axes() -> None:
    """MatMul reads columns, Gemm with transB rows: each gets its own axis (elsewhere 0.1 dB when optimized)."""
    weight = (normal(128, 128) * np.exp(RNG.uniform(-3, 3, (128, 1)))).astype(np.float32)
    proto = build(
        """g (float[N,128] x) => (float[N,128] y, float[N,128] z) {
            y = MatMul(x, w)
            z = Gemm <transB=1>(x, w, b)
        }""",
        {"w": weight, "b": normal(128)},
    )
    data = {"x": np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)}
    result = onnxq.quantize(proto, data, EVERYTHING, overrides={"latency": False})
    good(result)
    axes = {
        site.consumers[0].node: site.spec.granularity.axis  # type: ignore[index, union-attr]
        for site in result.plan.sites
        if str(site.role) == "weight"
    }
    assert sorted(axes.values()) == [0, 1]


def test_tied_weight_on_one_axis_is_stored_once() -> None:
    proto = build(
        """g (float[N,128] x) => (float[N,128] y) {
            a = MatMul(x, w)
            r = Relu(a)
            y = MatMul(r, w)
        }""",
        {"w": normal(128, 128)},
    )
    data = {"x": np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)}
    result = onnxq.quantize(proto, data, EVERYTHING, overrides={"latency": False})
    good(result)
    assert [str(site.site) for site in result.plan.sites if str(site.role) == "weight"] == ["w"]


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_overflow_in_an_activation_names_tensor_and_sample(bad: float) -> None:
    """Elsewhere an inf in one batch costs the model without a word."""
    proto = build(
        """g (float[N,32,8,8] x) => (float[N,32,8,8] y) {
            e = Exp(x)
            y = Conv <pads=[1,1,1,1]>(e, w)
        }""",
        {"w": normal(32, 32, 3, 3)},
    )
    data = images()
    data["x"][5, 0, 0, 0] = 200.0
    with pytest.raises(CalibrationError, match=r"(?s)\be\b.*sample 5"):
        onnxq.quantize(proto, data, EVERYTHING, overrides={"holdout": 1})


@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
def test_nan_in_a_weight_of_a_float_operator_is_not_blamed_on_the_samples(target: str) -> None:
    """Three layers behind it the first scale is made; the operator itself stays float."""
    proto = build(
        """g (float[N,32,16,16] x) => (float[N,32,16,16] y) {
            n = InstanceNormalization(x, scale, shift)
            r = Relu(n)
            a = Conv <pads=[1,1,1,1]>(r, w)
            y = Conv <pads=[1,1,1,1]>(a, v)
        }""",
        {
            "scale": np.full(32, np.nan, np.float32),
            "shift": normal(32),
            "w": normal(32, 32, 3, 3),
            "v": normal(32, 32, 3, 3),
        },
    )
    for data in (images(), None):
        with pytest.raises(
            CalibrationError, match=r"^scale: is a weight of \S+ \(InstanceNormalization\) and holds 32 NaN"
        ):
            onnxq.quantize(proto, data, overrides={"target": target})


def test_nan_in_the_data_names_input_and_sample() -> None:
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    data = images()
    data["x"][2, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match=r"(?s)x.*2"):
        onnxq.quantize(proto, data, EVERYTHING)


@pytest.mark.parametrize("observer", ["minmax", "percentile", "entropy", "mse"])
def test_ragged_samples(observer: str) -> None:
    """Sequences of any length, with every observer (elsewhere entropy and percentile crash)."""
    proto = build(
        """g (float[N,L,128] x) => (float[N,L,128] y) {
            a = MatMul(x, w)
            c = Add(a, b)
            r = Relu(c)
            y = MatMul(r, v)
        }""",
        {"w": normal(128, 128), "v": normal(128, 128), "b": normal(128)},
    )
    rng = np.random.default_rng(0)
    data = [{"x": rng.standard_normal((1, length, 128)).astype(np.float32)} for length in (3, 17, 5, 9, 17, 4, 8, 31)]
    wish = Config().activations.model_copy(update={"observer": onnxq.Config.model_validate(
        {"activations": {"scheme": "asymmetric", "observer": observer}}).activations.observer})  # fmt: skip
    result = onnxq.quantize(proto, data, Config(activations=wish, rules=EVERYTHING.rules), overrides={"latency": False})
    good(result, 18.0 if observer == "entropy" else 26.0)


@pytest.mark.parametrize("form", ["constant", "identity", "transpose", "reshape", "cast"])
def test_weights_that_are_no_initializers(form: str) -> None:
    """Elsewhere such weights are taken for activations and quantized per tensor."""
    weight = normal(32, 32, 3, 3) * np.exp(RNG.uniform(-3, 3, (32, 1, 1, 1))).astype(np.float32)
    makers = {
        "constant": [helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight))],
        "identity": [helper.make_node("Identity", ["w0"], ["w"])],
        "transpose": [helper.make_node("Transpose", ["w0"], ["w"], perm=[3, 2, 1, 0])],
        "reshape": [helper.make_node("Reshape", ["w0", "shape"], ["w"])],
        "cast": [helper.make_node("Cast", ["w0"], ["w"], to=TensorProto.FLOAT)],
    }
    stored = {
        "identity": weight,
        "transpose": weight.transpose(3, 2, 1, 0),
        "reshape": weight.reshape(32, -1),
        "cast": weight.astype(np.float16),
    }
    proto = build(CONVS, {"v": normal(32, 32, 3, 3)})
    if form in stored:
        proto.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(stored[form]), "w0"))
    if form == "reshape":
        proto.graph.initializer.append(numpy_helper.from_array(np.array([32, 32, 3, 3]), "shape"))
    nodes = [*makers[form], *proto.graph.node]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    good(result)
    assert kernels(result)["QLinearConv"] == 2
    weights = [site for site in result.plan.sites if str(site.role) == "weight"]
    assert all(site.qparams is not None and site.qparams.scale.shape == (32,) for site in weights)


def test_nodes_without_names() -> None:
    """Leaving one unnamed node float leaves that one (elsewhere all unnamed nodes go)."""
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    assert all(not node.name for node in proto.graph.node)
    rules = (Rule(tensor="y", set={"float": True}), *EVERYTHING.rules)  # type: ignore[arg-type]
    result = onnxq.quantize(proto, images(), Config(rules=rules), overrides={"latency": False})
    names = [node.name for node in result.model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    assert any("QuantizeLinear" in name for name in names)


def test_duplicate_names() -> None:
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    for node in proto.graph.node:
        node.name = "same"
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    good(result)
    names = [node.name for node in result.model.graph.node]
    assert len(set(names)) == len(names)


def branches() -> onnx.ModelProto:
    def body(name: str, weight: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Conv", ["x", weight], [f"{name}_a"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"{name}_a"], ["inner"]),
            helper.make_node("Conv", ["inner", weight], [f"{name}_y"], pads=[1, 1, 1, 1]),
        ]
        out = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [out])

    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], name="If", then_branch=body("t", "w"), else_branch=body("e", "v"))],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 32, 8, 8]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32, 8, 8])],
        [numpy_helper.from_array(normal(32, 32, 3, 3), "w"), numpy_helper.from_array(normal(32, 32, 3, 3), "v")],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def test_the_branch_that_ran_is_quantized_the_other_refused() -> None:
    """Both branches call a tensor `inner`; they are two tensors."""
    data = [{"x": sample[None], "flag": np.array(True)} for sample in images()["x"]]
    result = onnxq.quantize(branches(), data, EVERYTHING, overrides={"latency": False})
    good(result)
    scopes = {site.site.scope for site in result.plan.sites}
    assert scopes == {"If.then_branch"}
    assert any("If.else_branch" in refusal.subject for refusal in result.plan.refusals)
    optimized = optimize_graph(result.model)
    node = next(node for node in optimized.graph.node if node.op_type == "If")
    then = next(a.g for a in node.attribute if a.name == "then_branch")
    assert Counter(n.op_type for n in then.node)["QLinearConv"] == 2
    other = next(a.g for a in node.attribute if a.name == "else_branch")
    assert not any("QLinear" in n.op_type for n in other.node)


def test_both_branches_when_the_data_reaches_both() -> None:
    data = [{"x": s[None], "flag": np.array(k % 2 == 0)} for k, s in enumerate(images()["x"])]
    result = onnxq.quantize(branches(), data, EVERYTHING, overrides={"latency": False, "holdout": 2})
    good(result)
    assert {site.site.scope for site in result.plan.sites} == {"If.then_branch", "If.else_branch"}


def test_float16_model_fuses_and_keeps_its_types(tmp_path: Path) -> None:
    proto = build(
        CONVS.replace("float[", "float16["),
        {"w": normal(32, 32, 3, 3).astype(np.float16), "v": normal(32, 32, 3, 3).astype(np.float16)},
    )
    data = {"x": images()["x"].astype(np.float16)}
    result = onnxq.quantize(proto, data, EVERYTHING, overrides={"latency": False})
    good(result)
    assert kernels(result)["QLinearConv"] == 2
    assert result.model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert result.model.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_adding_a_tensor_to_itself() -> None:
    proto = build(
        """g (float[N,32,8,8] x) => (float[N,32,8,8] y) {
            a = Conv <pads=[1,1,1,1]>(x, w)
            d = Add(a, a)
            y = Conv <pads=[1,1,1,1]>(d, v)
        }""",
        {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)},
    )
    good(onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False}))


def test_existing_pairs_are_kept_and_never_doubled() -> None:
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    whole = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    first = Rule(tensor=("w",), set={"float": True})  # type: ignore[arg-type]
    part = EVERYTHING.model_copy(update={"rules": (first, *EVERYTHING.rules)})
    once = onnxq.quantize(proto, images(), part, overrides={"latency": False})
    twice = onnxq.quantize(once.model, images(), EVERYTHING, overrides={"latency": False})
    pairs = ("QuantizeLinear", "DequantizeLinear")
    count, again, kept = (
        Counter(node.op_type for node in result.model.graph.node if node.op_type in pairs)
        for result in (whole, twice, once)
    )
    assert again == count
    assert 0 < len(twice.report.kept) == kept.total() < count.total()


def test_activation_nodes_keep_their_names() -> None:
    """The Relu is still there under its name, though the engine folds it (elsewhere it is deleted from the file)."""
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    proto.graph.node[1].name = "my_relu"
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    assert "my_relu" in {node.name for node in result.model.graph.node}
    assert "Relu" not in kernels(result)


def test_input_model_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)}), path)
    before = path.read_bytes()
    onnxq.quantize(path, images(), EVERYTHING, overrides={"latency": False}, out=tmp_path / "q.onnx")
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "q.onnx"}


def test_same_inputs_same_bytes() -> None:
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    first = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    second = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    assert first.model.SerializeToString(deterministic=True) == second.model.SerializeToString(deterministic=True)
    assert first.plan_json() == second.plan_json()


def test_dynamic_batch_stays_dynamic() -> None:
    proto = build(CONVS, {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3)})
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    assert result.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    session = Session(result.model)
    for batch in (1, 5):
        assert session.run({"x": images(batch)["x"]})["y"].shape == (batch, 32, 8, 8)
