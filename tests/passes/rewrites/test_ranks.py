"""Nodes that move values of more than five axes do so on five at most, between Reshapes."""

from typing import Any

import numpy as np
import pytest

from onnxq.graph import GraphIndex, infer_shapes
from onnxq.passes.rewrites.ranks import lower_ranks
from tests.passes.kit import assert_changed, assert_untouched, parse, read_by

VALUES: dict[str, Any] = {
    "six": np.array([2, 3, 4, 1, 5, 2]), "seven": np.array([1, 2, 3, 2, 2, 5, 2]), "flat": np.array([240]),
    "first": np.array([0]), "third": np.array([3]), "one": np.array([1]), "two": np.array([2]), "last": np.array([-1]),
    "places": np.array([[0, 2], [1, 1]]), "place": np.array(-1), "few": np.array([3, 1, 1, 5, 2]),
    "weights": np.arange(10, dtype=np.float32).reshape(1, 5, 2), "alternate": np.ones((2, 1, 2, 1, 5, 1), np.float32),
}  # fmt: skip
# Nodes from r of six axes to t.
LINES = {
    "transpose": "t = Transpose<perm=[4,0,2,3,1,5]>(r)",
    "transpose that moves nothing": "t = Transpose<perm=[3,0,1,2,4,5]>(r)",
    "transpose of all axes": "t = Transpose(r)",
    "slice": "t = Slice(r, one, two, two)",
    "slice from behind": "t = Slice(r, first, third, last, one)",
    "gather": "t = Gather<axis=2>(r, places)",
    "gather of one place": "s = Gather<axis=-1>(r, place) u = Unsqueeze(s, first) t = Transpose<perm=[5,1,2,3,4,0]>(u)",
    "reduction": "t = ReduceMax<axes=[2], keepdims=0>(r)",
    "reduction that keeps its axis": "t = ReduceMean<axes=[-2]>(r)",
    "reduction by an input": "t = ReduceSum<keepdims=0>(r, one)",
    "squeeze": "t = Squeeze(r, third)",
    "columns and rows": "u = Slice(r, first, one, last) v = Slice(r, first, one, two) s = Add(u, v) t = Add(r, s)",
    "fewer axes": "u = Slice(r, first, one, two) v = Slice(u, first, one, first) s = Reshape(v, few) t = Mul(r, s)",
    "difference from a constant": "t = Sub(r, weights)",
    "chain": "u = Transpose<perm=[4,0,2,3,1,5]>(r) v = Slice(u, one, two, first) w = Squeeze(v, first) t = Neg(w)",
}


def make(lines: str, shape: str = "six", opset: int = 13) -> Any:
    nodes = f"a = Relu(x) r = Reshape(a, {shape}) {lines} z = Reshape(t, last) y = Neg(z)"
    return infer_shapes(parse(f"g (float[240] x) => (float[M] y) {{ {nodes} }}", opset=opset, **read_by(nodes, VALUES)))


# Of seven axes, in more runs than there may be axes.
PERMS = ("6,5,4,3,2,1,0", "0,1,3,5,2,4,6", "2,0,4,6,1,5,3")
SEVEN = [pytest.param(f"t = Transpose<perm=[{perm}]>(r)", "seven", id=perm) for perm in PERMS]


@pytest.mark.parametrize(
    ("lines", "shape"), [*(pytest.param(lines, "six", id=name) for name, lines in LINES.items()), *SEVEN]
)
def test_no_tensor_has_more_than_five_axes(lines: str, shape: str) -> None:
    after, _ = assert_changed(lower_ranks, make(lines, shape), "qnn")
    index = GraphIndex(infer_shapes(after))
    # The compiler crashes at a Transpose of one axis.
    assert all(len(node.attrs["perm"]) > 1 for node in index.nodes if node.op_type == "Transpose")
    assert max(len(index.find_shape(node.result) or ()) for node in index.nodes) <= 5


@pytest.mark.parametrize(
    ("lines", "shape"),
    [
        pytest.param("s = Reshape(r, flat) t = Neg(s)", "six", id="reshapes alone"),
        pytest.param("t = Neg(r)", "six", id="what computes"),
        pytest.param("s = Reshape(r, flat) t = Slice(s, one, third)", "six", id="one axis"),
        pytest.param("t = Sub(weights, r)", "six", id="a constant in front"),
        pytest.param("t = Mul(r, alternate)", "seven", id="a product of more runs than there may be axes"),
    ],
)
def test_what_stays(lines: str, shape: str) -> None:
    assert_untouched(lower_ranks, make(lines, shape))
