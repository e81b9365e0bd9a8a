"""A float16 model keeps its types for TensorRT: scales in float16 beside it, int8 kernels, the rest in half."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import onnxq
from onnxq.config import load_config
from onnxq.errors import ConfigError
from tests.targets.graphs import HEAD
from tests.targets.rtx import kernels, needs_rtx

C3 = "<pads=[1,1,1,1], kernel_shape=[3,3]>"
GRAPH = f"""g (float16[N,16,10,10] x) => (float16[N,16,10,10] y) {{
    a = Conv {C3}(x, w, b)
    i = Relu(a)
    c = Conv {C3}(i, v, b)
    d = Add(c, i)
    y = Conv {C3}(d, w, b)
}}"""


def half_model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HEAD + GRAPH)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (16, 16, 3, 3)), ("v", (16, 16, 3, 3)), ("b", (16,))):
        values = (rng.standard_normal(shape) / 12).astype(np.float16)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.checker.check_model(proto)
    return proto


def images(count: int = 8) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((count, 16, 10, 10)).astype(np.float16)}


def types(model: onnx.ModelProto, ending: str) -> set[int]:
    return {tensor.data_type for tensor in model.graph.initializer if tensor.name.endswith(ending)}


@pytest.mark.parametrize("changes", [{}, {"activations.bits": 6}, {"weights.bits": 4}])
def test_types_stay(changes: dict[str, object]) -> None:
    before = half_model()
    result = onnxq.quantize(before, images(), load_config("trt-int8", changes))
    assert result.model.graph.input == before.graph.input
    assert result.model.graph.output == before.graph.output
    assert types(result.model, "/scale") == {TensorProto.FLOAT16}
    assert types(result.model, "/zero_point") == {TensorProto.INT8}
    assert TensorProto.FLOAT not in {tensor.data_type for tensor in result.model.graph.initializer}
    assert "Cast" not in {node.op_type for node in result.model.graph.node}
    assert result.model.opset_import[0].version >= 19
    assert min(check.sqnr_db[0] for check in result.report.checks) > (15 if changes else 30)


def test_more_effort_leaves_out_what_half_cannot_bear_and_says_so() -> None:
    result = onnxq.quantize(half_model(), images(), "trt-int8", overrides={"effort": "balanced"})
    assert types(result.model, "/scale") == {TensorProto.FLOAT16}
    told = [line for line in result.report.accounts if "computes in float16" in line]
    assert [line.partition(":")[0] for line in told] == ["ranges", "rounding"]
    with pytest.raises(ConfigError, match="float16"):
        onnxq.quantize(half_model(), images(), "trt-int8", overrides={"min_sqnr": 99.0})


def test_applying_the_plan_gives_the_same_bytes() -> None:
    result = onnxq.quantize(half_model(), images(), "trt-int8")
    again = onnxq.apply(half_model(), result.plan)
    assert again.model.SerializeToString() == result.model.SerializeToString()


def test_ort_still_computes_in_float32() -> None:
    result = onnxq.quantize(half_model(), images(), overrides={"latency": False})
    assert types(result.model, "/scale") <= {TensorProto.FLOAT}
    assert result.plan.prepare[0] == "float32-compute"


@needs_rtx
@pytest.mark.trt
def test_tensorrt_runs_int8_beside_half(tmp_path: Path) -> None:
    made = kernels(onnxq.quantize(half_model(), images(), "trt-int8").model, tmp_path)
    heavy = [kernel for kernel in made if kernel.heavy]
    assert len(heavy) == 3
    assert all(kernel.int8 for kernel in heavy)
