"""Integers that follow from static dims: each must be the one that ONNX Runtime computes, whatever the batch is."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.graph.folding.values import infer_shape_values
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.graph.kit import model

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


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param("k = Shape(x)", id="a dynamic axis"),
        pytest.param("k = Size(x)", id="Size with a dynamic axis"),
        pytest.param("s = Shape(x) k = Gather(s, zeros)", id="Gather of a dynamic axis"),
        pytest.param("s = Shape(x) k = Slice(s, zeros, twos)", id="Slice with a dynamic axis"),
        pytest.param("s = Shape(x) k = Concat<axis=0>(ones, s)", id="Concat with a dynamic axis"),
        pytest.param("s = Shape<start=3>(x) k = Cast<to=1>(s)", id="Cast to float"),
        pytest.param("s = Shape<start=3>(x) k = Mul(s, twos)", id="arithmetic, which is folded elsewhere"),
        pytest.param("s = Shape(x) n = NonZero(x) k = Gather(s, n)", id="at places of the run"),
        pytest.param("k = Identity(ones)", id="a value of constants alone, which needs no shape to be known")
    ],
)  # fmt: skip
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
