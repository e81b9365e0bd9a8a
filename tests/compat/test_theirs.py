"""What is handed on: modules and names of onnxruntime.quantization that are not here."""

import importlib
import pkgutil
import sys
import warnings

import pytest
from onnxruntime import quantization

from onnxq import compat
from onnxq.compat import CompatWarning, calibrate, quant_utils


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
