"""The search for the smallest part that fails, with a stand-in for the build: any monotone fault is found exactly."""

import onnx
from hypothesis import given
from hypothesis import strategies as st

from onnxq.engines.prove.reduce import Parts, find_smallest_failure
from onnxq.graph import GraphIndex, infer_shapes
from tests.engines import kit

LENGTH = 12


def chain() -> GraphIndex:
    steps = [f"t{k} = Relu({'x' if k == 0 else f't{k - 1}'})" for k in range(LENGTH)]
    text = f"(float[2,4] x) => (float[2,4] t{LENGTH - 1}) {{ {' '.join(steps)} }}"
    return GraphIndex(infer_shapes(kit.graph(text)))


CHAIN = chain()


@given(st.sets(st.integers(0, LENGTH - 1), min_size=1, max_size=3), st.booleans())
def test_exactly_the_nodes_that_fail_together_are_left(culprits, hinted):
    names = {f"t{k}/Relu" for k in culprits}

    def fails(part: onnx.ModelProto) -> bool:
        onnx.checker.check_model(part)
        return names <= {node.name for node in part.graph.node}

    found = find_smallest_failure(CHAIN, fails, seconds=60, hint=f"t{max(culprits)}/Relu" if hinted else "")
    assert found is not None
    model, reduced = found
    assert set(reduced.nodes) == names
    assert {node.name for node in model.graph.node} == names
    assert reduced.ops == ("Relu",) * len(names)


def test_no_smaller_part_no_answer():
    everything = {node.name for node in CHAIN.nodes}
    found = find_smallest_failure(CHAIN, lambda part: {n.name for n in part.graph.node} == everything, seconds=60)
    assert found is None


def test_without_time_nothing_is_built():
    def fails(part: onnx.ModelProto) -> bool:
        raise AssertionError("built")

    assert find_smallest_failure(CHAIN, fails, seconds=-1) is None


def test_weights_go_with_their_reader_and_cuts_are_legal():
    index = GraphIndex(infer_shapes(kit.residual()))
    parts = Parts(index)
    assert "wd/DequantizeLinear" not in parts.names
    model = parts.cut_part(["d/Conv"])
    assert model is not None
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["rd"]
    assert [value.name for value in model.graph.output] == ["d"]
    assert {node.name for node in model.graph.node} == {"d/Conv", "wd/DequantizeLinear"}


def test_a_tensor_of_unknown_rank_is_not_cut():
    model = kit.residual()
    index = GraphIndex(model)  # no shapes inferred
    assert Parts(index).cut_part(["d/Conv"]) is None
