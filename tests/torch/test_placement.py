"""One planner: the front end puts its quantizers where the engine puts pairs into the export of the same network."""

from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnxq.backends import load_config
from onnxq.errors import ConfigError
from onnxq.sites import Role
from tests.torch.placed import NETS, Mark, engine_marks, front_end_marks
from torch_frontend.placement.rules import front_end_target

# By rules and sizes; for ONNX Runtime also with every operator forced, whatever its size.
EVERYTHING: dict[str, Any] = {"rules": [{"op": "*", "set": {"quantize": True}}]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ort": ("ort-int8", {}),
    "ort forced": ("ort-int8", EVERYTHING),
    "ort for avx2": ("ort-int8", {"cpu": "avx2"}),
    "trt": ("trt-int8", {}),
    "trt with attention": ("trt-int8", {"attention": "quantized"}),
    "ort weights": ("ort-int8-weights", {}),
}


# Of a fused attention torch writes the scale as its root on queries and on keys, the front end on one of them: as many
# tensors are quantized, and one or two of them have other values.
SCALED = {("trt with attention", "transformer"), ("trt with attention", "encoder")}
# With every operator forced the engine quantizes one tensor more in torch's own attention.
CELLS = [(config, net) for config in CONFIGS for net in NETS if (config, net) != ("ort forced", "encoder")]


@cache
def _both(name: str) -> Any:
    preset, more = CONFIGS[name]
    config = load_config(preset, more)
    return engine_marks(config), *front_end_marks(config)


def _same(one: tuple[Role, Mark], other: tuple[Role, Mark]) -> bool:
    near = np.allclose(one[1][1:], other[1][1:], rtol=1e-4, atol=1e-5)
    return one[0] is other[0] and one[1][0] == other[1][0] and near


@pytest.mark.parametrize(("config", "net"), CELLS)
def test_the_front_end_quantizes_what_the_engine_does(config: str, net: str) -> None:
    engine, _, front = _both(config)
    missing = [one for one in engine[net] if not any(_same(one, other) for other in front[net])]
    extra = [site for one, site in front[net].items() if not any(_same(one, other) for other in engine[net])]
    if (config, net) in SCALED:
        assert len(missing) == len(extra) == 2
        return
    assert not missing, (missing, sorted(front[net].values()))
    assert not extra


@pytest.mark.parametrize("config", ["ort", "trt"])
def test_a_transform_in_front_of_a_logarithm_stays_float_both_ways(config: str) -> None:
    """27 dB are at stake; what stands behind the logarithm is quantized."""
    engine, model, front = _both(config)
    left = {one.subject: one.rule for one in model.left_float}
    assert left["nets.spectrogram.stft"] == left["nets.spectrogram.filter"] == "log-front-end"
    weights = {site for (role, _), site in front["spectrogram"].items() if role is Role.WEIGHT}
    assert weights == {"nets.spectrogram.a.weight", "nets.spectrogram.b.weight"}
    assert sum(role is Role.WEIGHT for role, _ in engine["spectrogram"]) == 2


def test_something_is_quantized_in_most_nets() -> None:
    """Else the comparison would say nothing."""
    for config in CONFIGS:
        engine, _, _ = _both(config)
        assert sum(bool(found) for found in engine.values()) > 0.75 * len(NETS), config


@pytest.mark.parametrize(
    "more",
    [
        {"mode": "auto"},
        {"rules": [{"op": "MatMul", "set": {"dynamic": True}}]},
        {"rules": [{"op": "MatMul", "set": {"range": [-1, 1]}}]},
    ],
)
def test_scales_of_each_run_and_given_ranges_are_not_trained(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"all activations on scales of the file|finds its ranges itself.*\[Q307\]"):
        front_end_target(load_config("ort-int8", more))
