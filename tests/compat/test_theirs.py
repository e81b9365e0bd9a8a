"""What is handed on: modules and names of onnxruntime.quantization that are not here."""

import importlib
import pkgutil
import sys
import warnings

import numpy as np
import onnx
import pytest
from onnxruntime import quantization

from onnxq import compat
from onnxq.compat import CompatWarning, calibrate, qdq_loss_debug, quant_utils, quantize_static
from tests.compat import scripts


def test_every_module_is_there() -> None:
    names = [name for _, name, _ in pkgutil.walk_packages(quantization.__path__, "onnxruntime.quantization.")]
    assert len(names) > 40
    for name in names:
        # Neural Compressor's own package imports what may not be there.
        if "neural_compressor" not in name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CompatWarning)
                importlib.import_module(name.replace("onnxruntime.quantization", "onnxq.compat"))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("onnxq.compat.nothing")


def test_names_are_the_very_ones() -> None:
    assert quant_utils.QuantType is quantization.QuantType
    assert calibrate.TensorsData is compat.TensorsData is quantization.TensorsData
    assert quant_utils.ms_domain == "com.microsoft"
    from onnxruntime.quantization.execution_providers.qnn import fusion_lpnorm

    from onnxq.compat.execution_providers.qnn.fusion_lpnorm import FusionLpNormalization

    assert FusionLpNormalization is fusion_lpnorm.FusionLpNormalization
    with pytest.raises(AttributeError, match="nothing"):
        _ = quant_utils.nothing


def test_a_class_that_quantizes_says_so() -> None:
    sys.modules.pop("onnxq.compat.qdq_quantizer", None)
    with pytest.warns(CompatWarning, match="qdq_quantizer is onnxruntime's own and quantizes as onnxruntime does"):
        assert compat.QDQQuantizer is quantization.QDQQuantizer


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
