"""A part of a model as a model."""

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.engines.diff.bisect import FedParts
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.engines.diff.models import PAIRS, samples
from tests.graph.shape_nets import ShapeNet, shape_nets

_SEQUENCES = ("SplitToSequence", "SequenceInsert")


@settings(max_examples=15, deadline=None)
@given(shape_nets(), st.data())
def test_parts_carry_sizes_ranks_and_sequences(net: ShapeNet, data: st.DataObject) -> None:
    proto, (feeds,) = net.model(), net.feeds((6, 11))
    made = [name for node in proto.graph.node for name in node.output if node.op_type not in _SEQUENCES]
    session = Session(
        tap_tensors(proto, [TensorId(n) for node in proto.graph.node for n in node.output]).proto, optimize=False
    )
    values = {**feeds, **session.run(feeds)}
    parts = FedParts(GraphIndex(proto), lambda wanted: {name: values[name] for name in wanted})
    output = data.draw(st.sampled_from(made))
    ends = data.draw(st.sets(st.sampled_from([*values]), max_size=4))
    model, inputs = parts.cut_fed(parts.list_between([output], ends - {output}), output)
    np.testing.assert_array_equal(Session(model, optimize=False, threads=1).run(inputs)[output], values[output])


def test_a_part_is_a_model_that_computes_the_same() -> None:
    proto = infer_shapes(name_nodes(PAIRS))
    feeds = {"x": samples(3)["x"]}
    names = ["r", "r/quantized", "r/dequantized", "b", "s"]
    tapped = onnx.ModelProto.FromString(proto.SerializeToString())
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = Session(tapped, optimize=False, threads=1).run(feeds)
    asked: list[str] = []

    def given(wanted):  # type: ignore[no-untyped-def]
        asked.extend(wanted)
        return {name: values[name] for name in wanted}

    parts = FedParts(GraphIndex(proto), given)
    inside = {"r/DequantizeLinear", "w1/DequantizeLinear", "node_b"}
    model, inputs = parts.cut_fed(inside, "b")
    onnx.checker.check_model(model)
    assert list(inputs) == ["r/quantized"]
    assert set(asked) == {"r/quantized", "b"}
    np.testing.assert_array_equal(Session(model, optimize=False, threads=1).run(inputs)["b"], values["b"])
    assert parts.list_needed(["b"], {*inside, "node_y"}) == parts.sort_names(inside)
    assert parts.list_inputs(inside) == ["r/quantized"]
