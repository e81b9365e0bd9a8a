"""Which two products OpenVINO's kernels for AVX2 add in 16 bits, asked of the kernels themselves."""

from itertools import combinations

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxq.backends import find_engine
from onnxq.backends.engine import Job
from onnxq.backends.openvino.rules import find_sum_order
from onnxq.graph import get_index, name_nodes
from onnxq.numerics import find_partners
from tests.backends.openvino.graphs import needs_openvino
from tests.networks import parse_text

Shape = tuple[int, ...]
# The newest kernels that oneDNN may take.
_ISA = "ONEDNN_MAX_CPU_ISA"


def make_product(op: str, weight: np.ndarray, x: Shape, **attributes: object) -> onnx.ModelProto:
    """A product of uint8 data of scale 1 and these weights of scale 1."""
    text = f"""g (float{list(x)} x) => (float[{",".join("ABCD"[: len(x)])}] y) {{
        x_q = QuantizeLinear(x, one, x_zero) x_dq = DequantizeLinear(x_q, one, x_zero)
        w = DequantizeLinear(w_q, one, w_zero) [product] y = {op}(x_dq, w) }}"""
    model = parse_text(text, one=1, x_zero=np.uint8(0), w_zero=np.int8(0), w_q=weight)
    model.graph.node[-1].attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
    return name_nodes(onnx.shape_inference.infer_shapes(model))


def _make_conv(size: Shape, **attributes: object) -> tuple[str, Shape, Shape, int, dict[str, object]]:
    channels = size[1] * int(str(attributes.get("group", 1)))
    return "Conv", (1, channels, 5, 5), size, 0, attributes


CASES = {
    "1x1": _make_conv((1, 8, 1, 1)),
    "3x3": _make_conv((1, 4, 3, 3)),
    "3x3 of an odd number": _make_conv((1, 3, 3, 3)),
    "transposed": ("ConvTranspose", (1, 4, 5, 5), (4, 1, 2, 2), 1, {}),
    "transposed, of an odd number": ("ConvTranspose", (1, 3, 5, 5), (3, 1, 2, 2), 1, {}),
    "depthwise": _make_conv((1, 1, 3, 3), group=36),
    "MatMul": ("MatMul", (16, 9), (9, 1), 1, {}),
    "Gemm, transposed": ("Gemm", (16, 8), (1, 8), 0, {"transB": 1}),
}


def list_taps(one: Shape) -> list[tuple[int, int]]:
    """Every two positions of a row of weights."""
    return list(combinations(range(int(np.prod(one))), 2))


def make_weight(name: str) -> np.ndarray:
    """A row for each two positions, with 127 at both."""
    _, _, one, axis, attributes = CASES[name]
    taps = list_taps(one)
    rows = np.zeros((int(str(attributes.get("group", len(taps)))), int(np.prod(one))), np.int8)
    for row, both in zip(rows, taps, strict=True):
        row[list(both)] = 127
    weight = np.moveaxis(rows.reshape(len(rows), *(size for k, size in enumerate(one) if k != axis)), 0, axis)
    return np.ascontiguousarray(weight)


def make_case(name: str) -> onnx.ModelProto:
    op, x, *_, attributes = CASES[name]
    return make_product(op, make_weight(name), x, **attributes)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The answers of the kernels to each case, with 255 everywhere: all of them in one network."""
    first, *rest = (onnx.compose.add_prefix(make_case(name), f"{name}/") for name in CASES)
    for other in rest:
        first.graph.MergeFrom(other.graph)
    feeds = {f"{name}/x": np.full(x, 255, np.float32) for name, (_, x, *_) in CASES.items()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(_ISA, "AVX2")
        folder = tmp_path_factory.mktemp("sums")
        with find_engine("openvino").open_runner("avx2", first, Job(), folder) as runner:
            found = runner.infer(feeds)
    return {name: np.asarray(found[f"{name}/y"]) for name in CASES}


@needs_openvino
@pytest.mark.parametrize("name", CASES)
def test_weights_overflow_where_the_order_adds_them(name: str, answers: dict[str, np.ndarray]) -> None:
    op, _, one, axis, _ = CASES[name]
    taps, weight, answer = list_taps(one), make_weight(name), answers[name]
    largest = answer.max(axis=(0, 2, 3)) if op.startswith("Conv") else answer[0]
    order = find_sum_order(get_index(make_case(name)).find_node("product"), weight.shape)
    flat = np.zeros(weight.shape, np.int64) if order is None else find_partners(weight.shape, order)
    places = np.arange(weight.size).reshape(weight.shape)
    partners, at = (np.moveaxis(array, axis, 0).reshape(len(taps), -1) for array in (flat, places))
    shared = [order is not None and partners[k, a] == at[k, b] for k, (a, b) in enumerate(taps)]
    np.testing.assert_array_equal(largest, np.where(shared, 32767, 2 * 127 * 255))
    assert any(shared) == (name != "depthwise")
