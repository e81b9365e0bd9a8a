"""Weights and activations beside the float ones, with onnxruntime's functions around ours."""

import warnings

import numpy as np
import onnx
import pytest

from onnxq.compat import CompatWarning, qdq_loss_debug, quantize_static
from tests.compat import scripts


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The paths of a float model and a quantized one, and samples."""
    folder = tmp_path_factory.mktemp("debug")
    proto = scripts.make_net(scripts.CLASSIFIER)
    samples = [{"x": x} for x in scripts.make_inputs(proto, 4)]
    onnx.save(proto, folder / "f.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompatWarning)
        quantize_static(proto, folder / "q.onnx", samples, op_types_to_quantize=["Conv", "Gemm", "Add"])
    return folder / "f.onnx", folder / "q.onnx", samples


def test_weights(pair) -> None:
    matching = qdq_loss_debug.create_weight_matching(*map(str, pair[:2]))
    graph = onnx.load(pair[0]).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert matching.keys() == {
        name for node in graph.node if node.op_type in ("Conv", "Gemm") for name in node.input[1:]
    }
    for name, entry in matching.items():
        assert entry["float"].shape == stored[name].shape
        np.testing.assert_allclose(entry["dequantized"], entry["float"], atol=0.05 * np.abs(entry["float"]).max())
    assert all(20 < error < 300 for error in qdq_loss_debug.compute_weight_error(matching).values())


def test_activations(pair, tmp_path) -> None:
    seen = []
    for path in pair[:2]:
        qdq_loss_debug.modify_model_output_intermediate_tensors(str(path), tmp_path / "a.onnx")
        seen.append(qdq_loss_debug.collect_activations(str(tmp_path / "a.onnx"), iter(pair[2])))
    matching = qdq_loss_debug.create_activation_matching(seen[1], seen[0])
    assert sum("float" in entry for entry in matching.values()) > 1
    errors = qdq_loss_debug.compute_activation_error(matching)
    assert all(error["qdq_err"] > 25 and error.get("xmodel_err", 99) > 20 for error in errors.values())
    theirs = {"t_QuantizeLinear_Input": [1], "t": [2], "u": [3], "u_DequantizeLinear_Output": [4], "v_scale": [5]}
    assert qdq_loss_debug.create_activation_matching(theirs, {"t": [6]}) == {
        "t": {"pre_qdq": [1], "post_qdq": [2], "float": [6]}, "u": {"pre_qdq": [3], "post_qdq": [4]},
    }  # fmt: skip
