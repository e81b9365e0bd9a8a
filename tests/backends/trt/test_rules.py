"""Every placement rule of the trt target puts its pairs where it says, and TensorRT makes int8 kernels of them."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import onnxq
from onnxq.backends import load_config
from onnxq.backends.engine import Kernel
from onnxq.backends.trt.rules import RULES, TRT
from onnxq.plan import AttentionKind
from onnxq.sites import Role
from tests.backends.graphs import judge, model
from tests.backends.rtx import is_heavy, kernels, kernels_by_name, list_types, needs_rtx, runs_int8
from tests.backends.trt_graphs import ATTENTION, ATTENTION_WEIGHTS, C3, CASES, QKV, QKV_ROWS, QKV_WEIGHTS

CONFIG = load_config("trt-int8", {"activations.observer": "minmax", "attention": "float"})
FORCE_ATTENTION = {"rules": [{"op": "MatMul", "set": {"quantize": True}}]}


def samples(proto: onnx.ModelProto, count: int = 4) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    fixed = {tensor.name for tensor in proto.graph.initializer}
    shapes = {
        value.name: [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
        for value in proto.graph.input
        if value.name not in fixed
    }
    return [{k: rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()} for _ in range(count)]


def float_model(name: str) -> onnx.ModelProto:
    return model(CASES[name].text, weights=CASES[name].weights)


def quantize(proto: onnx.ModelProto, config: object = CONFIG, effort: str = "balanced") -> onnxq.Result:
    return onnxq.quantize(proto, samples(proto), config, overrides={"latency": False, "effort": effort})


# Results are for all tests of a case, which change nothing in them.
@cache
def quantized(name: str) -> onnxq.Result:
    return quantize(float_model(name), effort="fast")


WISHES: dict[str, dict[str, object]] = {
    "none": {},
    "forced": FORCE_ATTENTION,
    "half of it": {"rules": [{"node": "matmul9", "set": {"quantize": True}}]},
    "auto": {"attention": "auto"},
    "auto beside float32": {"attention": "auto", "high_precision": "float32"},
    "float": {"attention": "float"},
    "quantized": {"attention": "quantized"},
}


@cache
def attention(wish: str = "none") -> onnxq.Result:
    return quantize(model(ATTENTION, weights=ATTENTION_WEIGHTS), load_config(CONFIG, WISHES[wish]))


@cache
def cut_attention(wish: str = "none", text: str = QKV) -> onnxq.Result:
    return quantize(model(text, weights=QKV_WEIGHTS), load_config(CONFIG, WISHES[wish]))


def pairs(result: onnxq.Result) -> set[str]:
    return {str(site.tensor) for site in result.plan.sites if site.role is not Role.WEIGHT}


def test_every_rule_has_a_graph() -> None:
    used = {site.rule for name in CASES for site in quantized(name).plan.sites}
    used |= {site.rule for site in attention("forced").plan.sites}
    used |= {site.rule for site in cut_attention().plan.sites}
    assert used >= {rule.name for rule in RULES if not rule.joins} - {"product"}


@pytest.mark.parametrize("name", CASES)
def test_pairs_stand_where_the_rules_say(name: str) -> None:
    case, result = CASES[name], quantized(name)
    assert pairs(result) == case.pairs
    refused = {one.subject: one.reason for one in (*result.report.refusals, *result.report.left_float)}
    assert set(refused) == set(case.refused)
    for node, reason in case.refused.items():
        assert reason in refused[node]
    groups: dict[str, set[str]] = {}
    for site in result.plan.sites:
        if site.group:
            groups.setdefault(site.group, set()).add(str(site.tensor))
            assert site.qparams is not None
    assert {frozenset(group) for group in groups.values()} == set(case.groups)
    for group in case.groups:
        scales = {float(s.qparams.scale) for s in result.plan.sites if str(s.tensor) in group and s.qparams is not None}
        assert len(scales) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_file_says_only_what_tensorrt_reads(name: str) -> None:
    """int8 with an explicit zero point 0, scales of shape [], weights per output channel, no int32."""
    result = quantized(name)
    held = {tensor.name: tensor for tensor in result.model.graph.initializer}
    found = [node for node in result.model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert found
    for node in found:
        scale, zero = held[node.input[1]], held[node.input[2]]
        assert zero.data_type == TensorProto.INT8
        assert not numpy_helper.to_array(zero).any()
        assert list(zero.dims) == list(scale.dims)
        if node.op_type == "QuantizeLinear" or node.input[0] not in held:
            assert list(scale.dims) == []
        else:
            assert len(scale.dims) == 1
            axis = next(attr.i for attr in node.attribute if attr.name == "axis")
            assert held[node.input[0]].dims[axis] == scale.dims[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Kernel]]:
    return kernels_by_name({name: quantized(name).model for name in CASES}, tmp_path_factory.mktemp("rtx"))


@needs_rtx
@pytest.mark.trt
@pytest.mark.parametrize("name", CASES)
def test_tensorrt_makes_int8_kernels(name: str, built: dict[str, list[Kernel]], tmp_path: Path) -> None:
    case = CASES[name]
    made = built.get(name) or kernels(quantized(name).model, tmp_path)
    integers = [runs_int8(kernel) for kernel in made if is_heavy(kernel)]
    assert (integers.count(True), integers.count(False)) == (case.int8, case.floats), made


@needs_rtx
@pytest.mark.trt
@pytest.mark.parametrize("name", ["residual-identity", "residual-downsample", "residual-linear"])
def test_residual_adds_cost_no_kernel_and_read_int8(name: str, built: dict[str, list[Kernel]], tmp_path: Path) -> None:
    """The convolution's own epilogue adds: one kernel between two convolutions, as without a residual."""
    made = built.get(name) or kernels(quantized(name).model, tmp_path)
    adding = [kernel for kernel in made if any(node.startswith("add") for node in kernel.nodes)]
    sums = {node for kernel in adding for node in kernel.nodes if node.startswith("add")}
    assert len(adding) == len(sums)
    for kernel in adding:
        assert kernel.kind == "kgen"
        # RTX writes the other branch's convolution in float and rounds it here; TensorRT proper writes it in int8.
        assert list_types(kernel.inputs).count("int8") == (0 if name == "residual-downsample" else 1)
        assert list_types(kernel.outputs) == ["int8"]
    assert len(made) <= len(kernels(quantize(float_model(name), load_config(CONFIG, NO_ADDS)).model, tmp_path))


def test_one_row_is_quantized_when_forced_or_large() -> None:
    forced = load_config(CONFIG, {"rules": [{"op": "Gemm", "set": {"quantize": True}}]})
    assert pairs(quantize(float_model("gemm-one-row"), forced)) == {"x", "f"}
    large = model("g (float[N,2048] x) => (float[N,2048] y) { y = Gemm(x, w) }", weights={"w": (2048, 2048)})
    assert pairs(quantize(large)) == {"x"}


@pytest.mark.parametrize(
    ("name", "tensor", "reads"),
    [("residual-identity", "i", True), ("residual-linear", "i", True), ("no-residual", "d", False)],
)
def test_the_skip_branch_reads_the_pair_that_is_there(name: str, tensor: str, reads: bool) -> None:
    site = next(site for site in quantized(name).plan.sites if str(site.tensor) == tensor)
    assert any(edge.node.startswith("add") for edge in site.consumers or ()) is reads


def test_a_block_that_ends_in_a_linear_layer_is_no_residual_block() -> None:
    """As in ConvNeXt: no convolution can take the sum in, so the Add reads floats."""
    text = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
        a = Conv {C3}(x, w) d = Conv <pads=[1,1,1,1], group=32>(a, z) t = Transpose <perm=[0,2,3,1]>(d)
        n = LayerNormalization(t, s, s) m = MatMul(n, u) k = Transpose <perm=[0,3,1,2]>(m) e = Add(k, a)
        y = Conv {C3}(e, w)
    }}"""
    proto = model(text, weights={"w": (32, 32, 3, 3), "z": (32, 1, 3, 3), "s": (32,), "u": (32, 32)})
    result = quantize(proto)
    assert pairs(result) == {"x", "a", "n", "e"}
    assert not [site for site in result.plan.sites if any(e.node == "add6" for e in site.consumers or ())]


NO_ADDS = {"rules": [{"op": "Add", "set": {"float": True}}]}


def test_a_residual_add_can_be_left_float() -> None:
    assert pairs(quantize(float_model("residual-downsample"), load_config(CONFIG, NO_ADDS))) == {"x", "i", "r", "e"}


def test_attention_stays_float_unless_forced() -> None:
    result = attention()
    assert pairs(result) == {"x", "o"}
    assert {one.subject for one in result.report.left_float} == {"matmul9", "matmul13"}
    assert all("attention" in one.reason and one.code == "F104" for one in result.report.left_float)


def test_attention_is_quantized_where_it_keeps_the_answers() -> None:
    result = attention("auto beside float32")
    assert result.plan.quantizes_attention
    assert pairs(result) == {"x", "o", "q", "k", "p", "v", "o0"}
    assert "attention quantized" in result.report.placement


def test_attention_stays_float_beside_float16_unless_it_loses_next_to_nothing() -> None:
    """There it is one kernel as well: integers save none."""
    result = attention("auto")
    assert result.plan.attention.kind is AttentionKind.FLOAT
    assert "more than 0.1 dB" in result.report.left_float[0].reason


def test_attention_stays_float_where_it_does_not() -> None:
    """Outliers in the keys of one head leave the others no levels."""
    proto = model(ATTENTION, weights=ATTENTION_WEIGHTS)
    for tensor in proto.graph.initializer:
        if tensor.name in ("wq", "wk"):
            wide = numpy_helper.to_array(tensor).copy()
            wide[:, :2] *= 400.0 if tensor.name == "wk" else 0.0025
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    result = quantize(proto, load_config(CONFIG, WISHES["auto"]))
    assert result.plan.attention.kind is AttentionKind.FLOAT
    assert result.plan.attention.quantized_db < result.plan.attention.float_db
    assert pairs(result) == {"x", "o"}
    assert result.plan.calibrated
    assert {one.subject for one in result.report.left_float} == {"matmul9", "matmul13"}
    assert all("held-back" in one.reason for one in result.report.left_float)


def test_forced_attention_is_quantized_whole() -> None:
    result = attention("forced")
    assert pairs(result) == {"x", "o", "q", "k", "p", "v", "o0"}
    assert not result.report.refusals
    assert not result.report.left_float
    # The result of a common weight for query, key and value has a pair.
    assert pairs(cut_attention()) == pairs(cut_attention(text=QKV_ROWS)) == {"x", "i", "o"}


def test_half_of_attention_is_refused() -> None:
    """QK^T alone would break TensorRT's fused kernel in three."""
    result = attention("half of it")
    assert pairs(result) == {"x", "o"}
    reasons = {one.subject: one.reason for one in (*result.report.refusals, *result.report.left_float)}
    assert "only together with matmul13" in reasons["matmul9"]


@needs_rtx
@pytest.mark.trt
def test_int8_attention_is_one_kernel(tmp_path: Path) -> None:
    made = kernels(attention("forced").model, tmp_path)
    assert all(runs_int8(kernel) for kernel in made if is_heavy(kernel))
    assert [kernel.kind for kernel in made if "mha" in kernel.name] == ["kgen"]
    assert not [
        kernel for kernel in made if is_heavy(kernel) and "matmul9" in kernel.nodes and "mha" not in kernel.name
    ]


@needs_rtx
@pytest.mark.trt
@pytest.mark.parametrize("choice", ["float", "quantized"])
@pytest.mark.parametrize(("text", "product"), [(QKV, "matmul0"), (QKV_ROWS, "gemm0")], ids=["MatMul", "Gemm"])
def test_a_common_weight_for_query_key_and_value_runs_in_int8(
    choice: str, text: str, product: str, tmp_path: Path
) -> None:
    """Without the pair on the result TensorRT cuts the weight in three and multiplies in float."""
    made = kernels(cut_attention(choice, text).model, tmp_path)
    common = [kernel for kernel in made if is_heavy(kernel) and product in kernel.nodes]
    assert common
    assert all(runs_int8(kernel) and kernel.kind == "gemm" for kernel in common)


@needs_rtx
@pytest.mark.trt
def test_fp8_kernels(tmp_path: Path) -> None:
    result = quantize(float_model("conv-relu"), "trt-fp8")
    heavy = [kernel for kernel in kernels(result.model, tmp_path, sm=89) if is_heavy(kernel)]
    assert len(heavy) == 2
    assert all("float8" in list_types(kernel.inputs) for kernel in heavy)


@needs_rtx
@pytest.mark.trt
def test_int4_blocks_are_fused_into_the_product(tmp_path: Path) -> None:
    text = "g (float[N,16,256] x) => (float[N,16,128] y) { a = MatMul(x, w) y = Add(a, b) }"
    result = quantize(model(text, weights={"w": (256, 128), "b": (128,)}), "trt-int4-weights")
    fused = [kernel for kernel in kernels(result.model, tmp_path) if "int4" in list_types(kernel.weights)]
    assert [kernel.kind for kernel in fused] == ["runtime_fusion"]


ROWS = "float[4,8]"
RULED: dict[str, tuple[str, str | None, str]] = {
    "conv": ("g (float[2,8,6,6] x) => (float[2,8,6,6] y) { [n] y = Conv(x, w) }", "conv", ""),
    "a computed kernel": (
        "g (float[2,8,6,6] x, float[8,8,1,1] k) => (float[2,8,6,6] y) { [n] y = Conv(x, k) }", None, "at run time",
    ),
    "gemm": (f"g ({ROWS} x) => ({ROWS} y) {{ [n] y = Gemm(x, m) }}", "gemm", ""),
    "turned data": ("g (float[8,4] x) => (float[4,8] y) { [n] y = Gemm<transA=1>(x, m) }", None, "transA=1"),
    "computed weights": (f"g ({ROWS} x, float[8,8] k) => ({ROWS} y) {{ [n] y = Gemm(x, k) }}", None, "left float"),
    "one column": (f"g ({ROWS} x) => (float[4,1] y) {{ [n] y = Gemm(x, column) }}", None, "with one column"),
    "one column turned": ("g (float[4,1] x) => (float[4,8] y) { [n] y = Gemm<transB=1>(x, column) }", "gemm", ""),
    "matmul": (f"g ({ROWS} x) => ({ROWS} y) {{ [n] y = MatMul(x, m) }}", "matmul", ""),
    "weights on the left": ("g (float[8,4] x) => (float[8,4] y) { [n] y = MatMul(m, x) }", None, "stands on the left"),
    "two activations": ("g (float[4,4] x) => (float[4,4] y) { [n] y = MatMul(x, x) }", "product", ""),
    "a Concat": (f"g ({ROWS} x) => (float[8,8] y) {{ [n] y = Concat<axis=0>(x, x) }}", "concat", ""),
    "an Add": (f"g ({ROWS} x, {ROWS} z) => ({ROWS} y) {{ [n] y = Add(x, z) }}", None, ""),
    "pooling a constant": ("g (float[8] x) => (float[8,8,1,1] y) { [n] y = MaxPool<kernel_shape=[1,1]>(w) }", None, ""),
}  # fmt: skip


@pytest.mark.parametrize(("text", "rule", "reason"), RULED.values(), ids=RULED)
def test_which_rule_takes_a_node_and_why_none_does(text: str, rule: str | None, reason: str) -> None:
    found, told = judge(TRT, text)
    assert found == rule
    assert reason in told
    assert bool(told) is bool(reason)
