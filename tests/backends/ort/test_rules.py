"""Every placement rule of the ort target makes the kernel it is there for, in ORT's own optimized graph."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

import onnxq
from onnxq.backends.ort.rules import ORT, RULES
from onnxq.config import Config, Rule
from onnxq.runtime import optimize_graph
from tests.backends.graphs import GRAPHS, judge, model

ALL = Rule(op="*", set={"quantize": True})  # type: ignore[arg-type]
EVERYTHING = Config(effort="fast", rules=(ALL,))


@cache
def quantized(name: str) -> onnxq.Result:
    text, weights, _, _ = GRAPHS[name]
    proto = model(text, weights=weights)
    dims = [dim.dim_value or 1 for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    feeds = np.random.default_rng(1).standard_normal((48, *dims)).astype(np.float32)
    return onnxq.quantize(proto, {"x": feeds}, EVERYTHING, overrides={"latency": False})


def test_every_rule_has_a_graph() -> None:
    shown = {name.split("-clip")[0].split("-chain")[0] for name in GRAPHS}
    assert {rule.name for rule in RULES} <= shown


@pytest.mark.parametrize("name", GRAPHS)
def test_ort_makes_the_kernel_and_computes_what_the_file_says(name: str) -> None:
    result = quantized(name)
    ops = Counter(node.op_type for node in optimize_graph(result.model).graph.node)
    _, _, kernel, count = GRAPHS[name]
    assert ops[kernel] == count, ops
    assert not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(ops), f"something heavy stayed float: {ops}"
    if name in ("max-pool", "move", "resize-nearest"):
        # What moves data works on bytes.
        assert max(ops["QuantizeLinear"], ops["DequantizeLinear"]) <= 1
    for check in result.report.checks:
        assert check.agreement_db > 40
        assert min(check.sqnr_db) > 25


X = "float[2,8,6,6]"
RUN_TIME = "computed at run time: no quantized kernel takes it"
NODES: dict[str, tuple[str, str | None, str]] = {
    "conv": (f"g ({X} x) => ({X} y) {{ [n] y = Conv(x, w) }}", "conv", ""),
    "its weight is computed": (f"g ({X} x, float[8,8,1,1] k) => ({X} y) {{ [n] y = Conv(x, k) }}", None, RUN_TIME),
    "its bias is computed": (f"g ({X} x, float[8] k) => ({X} y) {{ [n] y = Conv(x, w, k) }}", None, "its bias is"),
    "gemm": ("g (float[4,8] x) => (float[4,8] y) { [n] y = Gemm(x, m, b) }", "gemm", ""),
    "its data is turned": ("g (float[8,4] x) => (float[4,8] y) { [n] y = Gemm<transA=1>(x, m) }", None, "transA=1"),
    "alpha": ("g (float[4,8] x) => (float[4,8] y) { [n] y = Gemm<alpha=0.5>(x, m) }", None, "alpha is not 1"),
    "beta": ("g (float[4,8] x) => (float[4,8] y) { [n] y = Gemm<beta=0.5>(x, m, b) }", None, "beta 1"),
    "a scalar bias": ("g (float[4,8] x) => (float[4,8] y) { [n] y = Gemm(x, m, one) }", None, "one bias a column"),
    "the weight first": ("g (float[4,8] x) => (float[8,8] y) { [n] y = Gemm(m, m) }", None, RUN_TIME),
    "matmul": ("g (float[4,8] x) => (float[4,8] y) { [n] y = MatMul(x, m) }", "matmul", ""),
    "attention": ("g (float[4,4] x) => (float[4,4] y) { [n] y = MatMul(x, x) }", None, "(attention): int8 gains"),
    "a stack of weights": ("g (float[2,4,3] x) => (float[2,4,4] y) { [n] y = MatMul(x, s) }", None, "not a matrix"),
    "a constant on the left": ("g (float[8,4] x) => (float[8,4] y) { [n] y = MatMul(m, x) }", None, "on the left"),
    "add": (f"g ({X} x, {X} z) => ({X} y) {{ [n] y = Add(x, z) }}", "residual-add", ""),
    # What only follows has no reason of its own: nobody expects it.
    "add of a constant": (f"g ({X} x) => ({X} y) {{ [n] y = Add(x, one) }}", None, ""),
    "doubling": (f"g ({X} x) => ({X} y) {{ [n] y = Add(x, x) }}", None, ""),
    "a gate": (f"g ({X} x, float[2,8,1,1] z) => ({X} y) {{ [n] y = Mul(x, z) }}", "gate-mul", ""),
    "a product of two maps": (f"g ({X} x, {X} z) => ({X} y) {{ [n] y = Mul(x, z) }}", None, ""),
    "a gate by row": (f"g ({X} x, float[2,8,6,1] z) => ({X} y) {{ [n] y = Mul(x, z) }}", None, ""),
    "concat": (f"g ({X} x) => (float[2,16,6,6] y) {{ [n] y = Concat<axis=1>(x, x) }}", "concat", ""),
    "concat of a constant": ("g (float[8] x) => (float[16] y) { [n] y = Concat<axis=0>(x, b) }", None, ""),
    "max pooling": (f"g ({X} x) => ({X} y) {{ [n] y = MaxPool<kernel_shape=[1,1]>(x) }}", "max-pool", ""),
    "in one dimension": ("g (float[2,8,6] x) => (float[2,8,6] y) { [n] y = MaxPool<kernel_shape=[1]>(x) }", None, ""),
    "with indices": (
        f"g ({X} x) => ({X} y, int64[a,b,c,d] i) {{ [n] y, i = MaxPool<kernel_shape=[1,1]>(x) }}", None, "",
    ),
    "nearest": (f"g ({X} x) => ({X} y) {{ [n] y = Resize<mode=\"nearest\">(x, , f) }}", "resize-nearest", ""),
    "linear": (f"g ({X} x) => ({X} y) {{ [n] y = Resize<mode=\"linear\">(x, , f) }}", None, ""),
    "moving": (f"g ({X} x) => ({X} y) {{ [n] y = Transpose<perm=[0,1,3,2]>(x) }}", "move", ""),
    "moving integers": ("g (int64[2,3] x) => (int64[3,2] y) { [n] y = Transpose(x) }", None, ""),
    "moving a constant": ("g (float[8] x) => (float[8,8] y) { [n] y = Transpose(m) }", None, ""),
    "another operator": (f"g ({X} x) => ({X} y) {{ [n] y = Tanh(x) }}", None, ""),
}  # fmt: skip


@pytest.mark.parametrize(("text", "rule", "reason"), NODES.values(), ids=NODES)
def test_which_rule_takes_a_node_and_why_none_does(text: str, rule: str | None, reason: str) -> None:
    found, told = judge(ORT, text)
    assert found == rule
    assert reason in told
    assert bool(told) is bool(reason)
