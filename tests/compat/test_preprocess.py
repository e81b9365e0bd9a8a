"""Preprocessing: the same network, named and with shapes, from Python and the command line."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.external_data_helper import uses_external_data

from onnxq.compat import CompatWarning, quant_pre_process
from onnxq.compat.execution_providers.qnn import qnn_preprocess_model
from onnxq.compat.preprocess import main
from onnxq.errors import ConfigError
from tests.compat import scripts
from tests.networks import parse_text


def test_the_network_stays_and_every_node_has_a_name(tmp_path) -> None:
    proto = scripts.make_net(scripts.CLASSIFIER)
    proto.graph.node[0].name = ""
    onnx.save(proto, tmp_path / "m.onnx")
    main(["--input", str(tmp_path / "m.onnx"), "--output", str(tmp_path / "p.onnx"), "--skip_symbolic_shape", "True"])
    made = onnx.load(tmp_path / "p.onnx")
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in proto.graph.node]
    assert all(node.name for node in made.graph.node)
    assert {one.name for one in made.graph.value_info} == set("crdstpf")
    assert made.graph.initializer == proto.graph.initializer


def test_weights_may_lie_beside(tmp_path) -> None:
    proto = scripts.make_net(scripts.CLASSIFIER)
    with pytest.warns(CompatWarning, match="external_data_location means nothing here"):
        quant_pre_process(proto, tmp_path / "p.onnx", save_as_external_data=True, external_data_location="weights.bin")
    assert (tmp_path / "p.onnx_data").exists()


@pytest.mark.parametrize("write", [quant_pre_process, qnn_preprocess_model])
@pytest.mark.parametrize("least", [0, 40, 128, 5000])
def test_weights_of_a_size_lie_beside(write, least: int, tmp_path) -> None:
    proto = scripts.make_net(scripts.CLASSIFIER)
    # Values in a field of their own, as onnx.helper writes them.
    bias = next(tensor for tensor in proto.graph.initializer if tensor.name == "b2")
    bias.CopyFrom(onnx.helper.make_tensor("b2", bias.data_type, [10], onnx.numpy_helper.to_array(bias)))
    write(proto, tmp_path / "p.onnx", save_as_external_data=True, external_data_size_threshold=least)
    light = onnx.load(tmp_path / "p.onnx", load_external_data=False)
    beside = {tensor.name for tensor in light.graph.initializer if uses_external_data(tensor)}
    sizes = {tensor.name: onnx.numpy_helper.to_array(tensor).nbytes for tensor in proto.graph.initializer}
    assert beside == {name for name, size in sizes.items() if size >= least}
    again = {tensor.name: tensor for tensor in onnx.load(tmp_path / "p.onnx").graph.initializer}
    for tensor in proto.graph.initializer:
        value = onnx.numpy_helper.to_array(again[tensor.name])
        np.testing.assert_array_equal(value, onnx.numpy_helper.to_array(tensor))


@pytest.mark.parametrize(("opset", "op", "inputs", "made"), [
    (10, "Upsample", {"s": [1, 1, 2, 2]}, "Resize"), (6, "Clip", {"a": 0, "b": 6}, "Clip"),
])  # fmt: skip
def test_operators_of_another_opset_are_repaired(opset, op, inputs, made, tmp_path) -> None:
    size = 8 if op == "Upsample" else 4
    text = f"g (float[1,3,4,4] x) => (float[1,3,{size},{size}] y) {{ [n] y = {op}(x, {', '.join(inputs)}) }}"
    proto = parse_text(text, opset=opset, **{name: np.float32(value) for name, value in inputs.items()})
    quant_pre_process(proto, tmp_path / "p.onnx")
    done = onnx.load(tmp_path / "p.onnx")
    assert made in [node.op_type for node in done.graph.node]
    assert done.opset_import[0].version >= 11
    feed = np.arange(-20, 28, dtype=np.float32).reshape(1, 3, 4, 4)
    (answer,) = onnxruntime.InferenceSession(tmp_path / "p.onnx").run(None, {"x": feed})
    expected = feed.repeat(2, 2).repeat(2, 3) if op == "Upsample" else feed.clip(0, 6)
    np.testing.assert_array_equal(answer, expected)


def test_a_model_is_needed(tmp_path) -> None:
    with pytest.raises(ConfigError, match="input_model: is not given"):
        quant_pre_process(output_model_path=tmp_path / "p.onnx")
    proto = scripts.make_net(scripts.CLASSIFIER)
    quant_pre_process(output_model_path=tmp_path / "p.onnx", input_model_path=proto)
    assert (tmp_path / "p.onnx").exists()
