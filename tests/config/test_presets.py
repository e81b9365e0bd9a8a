"""The presets in configs/."""

import pytest

from onnxq.config import list_presets, read_config, read_preset
from onnxq.spec import FLOAT8, ObserverSpec, PerBlock, PerChannel, QuantSpec

INT8 = QuantSpec(bits=8, signed=True, granularity=PerChannel(0))
EXPECTED = {
    "ort-int8": ("static", "minmax", INT8),
    "ort-dynamic-embeddings": ("dynamic", "minmax", INT8),
    "ort-dynamic": ("dynamic", "minmax", INT8),
    "ort-int8-percentile": ("static", "percentile", INT8),
    "ort-int8-mse": ("static", "mse", INT8),
    "ort-int8-entropy": ("static", "entropy", INT8),
    "ort-int8-weights": ("weight-only", "minmax", INT8),
    "ort-int4-weights": (
        "weight-only",
        "minmax",
        QuantSpec(bits=4, signed=False, symmetric=False, granularity=PerBlock(0, 32), storage="uint4"),
    ),
    "ort-w4a8": (
        "static",
        "minmax",
        QuantSpec(bits=4, signed=True, narrow_range=True, granularity=PerChannel(0), storage="int4"),
    ),
    "ort-uint16-activations": ("static", "minmax", INT8),
    "trt-int8": ("static", "percentile", INT8),
    "trt-fp8": ("static", "minmax", QuantSpec(granularity=PerChannel(0), storage=FLOAT8)),
    "trt-fp16": ("float", "percentile", INT8),
    "trt-int4-weights": ("weight-only", "percentile", QuantSpec(bits=4, granularity=PerBlock(0, 128), storage="int4")),
    "openvino-int8": ("static", "minmax", INT8),
    "openvino-int8-weights": ("weight-only", "minmax", INT8),
    "qnn": ("static", "minmax", INT8),
    "qnn-int8": ("static", "minmax", INT8),
    "qnn-mixed": ("static", "minmax", INT8),
    "qnn-a16w8": ("static", "minmax", INT8),
    "qnn-w4a16": ("static", "minmax", QuantSpec(bits=4, signed=True, granularity=PerChannel(0), storage="int4")),
    "web-int8": ("static", "minmax", INT8),
    "web-dynamic": ("dynamic", "minmax", INT8),
    "web-int8-weights": ("weight-only", "minmax", INT8),
    "virtual-int8": ("static", "minmax", INT8),
}


def test_every_preset_is_listed_here():
    assert set(list_presets()) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_says_what_its_name_says(name):
    config = read_config(name)
    mode, observer, weights = EXPECTED[name]
    percentile = 99.9993 if config.target == "trt" else 99.999
    options = (("percentile", percentile),) if observer == "percentile" else ()
    assert (config.mode, config.weights.spec(0)) == (mode, weights)
    assert config.activations.observer == ObserverSpec(observer, options)
    bits = 16 if name in ("ort-uint16-activations", "qnn-a16w8", "qnn-w4a16") else 8
    activations = QuantSpec(bits=bits, signed=False, symmetric=False)
    if name.startswith("trt-"):
        activations = QuantSpec(storage=FLOAT8 if name == "trt-fp8" else "int8")
    assert config.activations.spec(None) == activations


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_is_commented_for_a_person(name):
    assert read_preset(name).startswith("# ")
