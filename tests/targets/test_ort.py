"""Every placement rule of the ort target makes the kernel it is there for, in ORT's own optimized graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import onnxq
from onnxq.config import Config, Rule
from onnxq.runtime import optimize_graph
from onnxq.targets.ort import RULES
from tests.targets.graphs import GRAPHS, model

EVERYTHING = Config(effort="fast", rules=(Rule(op="*", set={"quantize": True}),))  # type: ignore[arg-type]


def feeds(shape: tuple[int | str | None, ...], count: int = 48) -> np.ndarray:
    dims = [dim if isinstance(dim, int) else 1 for dim in shape]
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, *dims)).astype(np.float32)


def quantized(name: str) -> onnxq.Result:
    text, weights, _, _ = GRAPHS[name]
    proto = model(text, weights=weights)
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else None for dim in proto.graph.input[0].type.tensor_type.shape.dim
    )
    return onnxq.quantize(proto, {"x": feeds(shape)}, EVERYTHING, overrides={"latency": False})


def test_every_rule_has_a_graph() -> None:
    shown = {name.split("-clip")[0].split("-chain")[0] for name in GRAPHS}
    assert {rule.name for rule in RULES} <= shown


@pytest.mark.parametrize("name", GRAPHS)
def test_ort_makes_the_kernel(name: str) -> None:
    result = quantized(name)
    ops = Counter(node.op_type for node in optimize_graph(result.model).graph.node)
    _, _, kernel, count = GRAPHS[name]
    assert ops[kernel] == count, ops
    assert not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(ops), f"something heavy stayed float: {ops}"


@pytest.mark.parametrize("name", ["max-pool", "move", "resize-nearest"])
def test_moving_nodes_work_on_bytes(name: str) -> None:
    result = quantized(name)
    ops = Counter(node.op_type for node in optimize_graph(result.model).graph.node)
    assert ops["QuantizeLinear"] <= 1
    assert ops["DequantizeLinear"] <= 1


@pytest.mark.parametrize("name", GRAPHS)
def test_optimized_and_plain_answers_agree(name: str) -> None:
    for check in quantized(name).report.checks:
        assert check.agreement_db > 40
        assert min(check.sqnr_db) > 25
