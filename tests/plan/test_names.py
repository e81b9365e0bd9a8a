"""Names of a pair's parts: of its site, apart from each other, as docs and other rooms spell them."""

from hypothesis import given
from hypothesis import strategies as st

from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.plan.names import PARTS, is_clipped_part, name_part, site_base
from onnxq.sites import Edge, TensorId

names = st.text(min_size=1, max_size=12)


def test_nodes_are_called_after_their_operator() -> None:
    assert name_part(TensorId("x"), "q_node") == f"x/{QUANTIZE}" == "x/QuantizeLinear"
    assert name_part(Edge("conv", 1), "dq_node") == f"conv/in1/{DEQUANTIZE}" == "conv/in1/DequantizeLinear"
    assert is_clipped_part(name_part(TensorId("x"), "clipped"))
    assert name_part(TensorId("onnx::MatMul_12"), "scale") == "onnx::MatMul_12/scale"


@given(names, names, st.integers(0, 9))
def test_a_scope_is_no_part_of_a_name(name: str, scope: str, index: int) -> None:
    """Names of nodes are unique over the whole model, and tensors are looked up from the inside out."""
    assert site_base(TensorId(name, scope)) == site_base(TensorId(name)) == name
    assert site_base(Edge(name, index, scope)) == f"{name}/in{index}"


def test_no_two_parts_have_one_name() -> None:
    assert len({name_part(TensorId("x"), name) for name in PARTS}) == len(PARTS)
