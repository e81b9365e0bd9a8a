"""A request that TensorRT cannot take is refused where it was written, with file, line and what to write instead."""

from pathlib import Path

import pytest

from onnxq.backends import check_limits, load_config
from onnxq.config import Config
from onnxq.errors import ConfigError

WIDE = {"storage": "int16", "bits": 16}
FAULTS = [
    ("activations: {scheme: asymmetric}", "activations.scheme", "zero point", "symmetric"),
    ("weights: {scheme: asymmetric}", "weights.scheme", "zero point", "symmetric"),
    ("activations: {signed: false}", "activations.signed", "uint8", "signed: true"),
    ("weights: {signed: false}", "weights.signed", "uint8", "signed: true"),
    ("activations: {granularity: channel}", "activations.granularity", "float", "granularity: tensor"),
    ("activations: {bits: 16}", "activations.storage", "int8 or FP8", "bits: 8"),
    ("weights: {bits: 16}", "weights.storage", "int8 or FP8", "bits: 8"),
    ("weights: {bits: 4, storage: int4}", "weights.storage", "only weights", "weight-only"),
    ("weights: {granularity: block, block_size: 32}", "weights.granularity", "int4", "granularity: channel"),
    ("weights: {storage: float8e4m3fn}", "weights.storage", "FP8 by FP8", "both"),
    ("activations: {storage: float8e4m3fn}", "weights.storage", "FP8 by FP8", "both"),
    ("bias: int32", "bias", "int32", "bias: float"),
    ("emit: nbits", "emit", "MatMulNBits", "target: ort"),
    ("cpu: vnni", "cpu", "kind of CPU", "target: ort"),
    ("rules: [{op: Conv, set: {scheme: asymmetric}}]", "rules[0].set.scheme", "zero point", "symmetric"),
    ("rules: [{op: Conv, set: {signed: false}}]", "rules[0].set.signed", "uint8", "signed"),
    ("rules: [{op: Conv, set: {storage: uint8, signed: false}}]", "rules[0].set.signed", "uint8", "signed"),
    ("rules: [{op: Conv, set: {bits: 16}}]", "rules[0].set.bits", "16-bit", "float: true"),
]


@pytest.mark.parametrize(("line", "path", "cause", "fix"), FAULTS)
def test_a_fault_is_named_with_its_line(line: str, path: str, cause: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"extends: trt-int8\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.subject.endswith(f": {path}")
    # What a default holds against the line written is shown where the default stands.
    assert caught.value.subject.startswith(("trt-int8:", f"{file}:3: "))
    assert cause in caught.value.cause
    assert fix in caught.value.fix


def test_a_default_that_does_not_fit_is_shown_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    file.write_text("extends: ort-int8\ntarget: trt\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.file == "ort-int8"
    assert caught.value.subject.endswith(": activations.scheme")
    assert "extends: trt-int8" in caught.value.fix


def test_a_configuration_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"activations\.scheme"):
        check_limits(Config(target="trt"))


@pytest.mark.parametrize(
    ("preset", "overrides", "fix"),
    [
        ("virtual-int8", {}, "target: ort"),
        ("ort-int8-weights", {}, "mode: static"),
        ("ort-int8", {"placement": "measured"}, "placement: rules"),
    ],
)
def test_a_kind_of_cpu_is_for_placement_by_rules_in_onnx_runtime(
    preset: str, overrides: dict[str, str], fix: str
) -> None:
    with pytest.raises(ConfigError, match="cpu") as caught:
        load_config(preset, {**overrides, "cpu": "avx2"})
    assert fix in caught.value.fix
    assert load_config(preset, {**overrides, "cpu": "any"}).cpu == "any"


@pytest.mark.parametrize(
    ("preset", "overrides", "path", "fix"),
    [
        ("trt-int4-weights", {"weights.storage": "int16", "weights.bits": 16}, "weights.storage", "storage: int4"),
        ("trt-int4-weights", {"weights.bits": 16, "weights.storage": ""}, "weights.storage", "bits: 8"),
        ("trt-int4-weights", {"weights.bits": 8, "weights.storage": "int8"}, "weights.granularity", "channel"),
        ("trt-fp8", {"weights.storage": "int8"}, "weights.storage", "for both activations and weights"),
        ("ort-int8", {"attention": "auto"}, "attention", "attention: float"),
        ("virtual-int8", {"placement": "measured"}, "placement", "placement: rules"),
        ("trt-int8", {"rules": [{"op": "Conv", "set": WIDE}]}, "rules[0].set.bits", "float"),
        # Its levels are not evenly spaced.
        ("trt-fp8", {"activations.observer": "entropy"}, "activations.observer", "minmax"),
        ("trt-int8", {"rules": [{"op": "Conv", "set": {"storage": "uint8"}}]}, "rules[0].set.storage", "signed type"),
    ],
)
def test_limits_of_every_target(preset: str, overrides: dict[str, object], path: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(preset, overrides)
    assert caught.value.code == "Q307"
    assert caught.value.subject.endswith(path)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("trt-int4-weights", {"activations.scheme": "asymmetric"}),  # they stay float
        ("trt-fp8", {"activations.observer": "percentile"}),
        ("trt-int8", {"rules": [{"op": "Conv", "set": {"float": True}}]}),
        ("ort-int8", {"cpu": "vnni"}),
        ("ort-int8", {"weights.scheme": "asymmetric"}),
        ("ort-int4-weights", {"emit": "nbits", "accuracy_level": 4}),
        ("virtual-int8", {"weights.scheme": "asymmetric", "attention": "quantized"}),
    ],
)
def test_what_an_engine_takes_is_let_pass(preset: str, overrides: dict[str, object]) -> None:
    assert load_config(preset, overrides).target == preset.split("-")[0]


def test_int8_weights_alone_are_for_tensorrt_too() -> None:
    base = load_config("trt-int4-weights")
    wish = {"bits": 8, "storage": "int8", "granularity": "channel", "block_size": None}
    weights = base.weights.model_copy(update=wish)
    assert check_limits(base.model_copy(update={"weights": weights})).weights.granularity == "channel"


def test_a_target_without_limits_of_its_own_has_none() -> None:
    config = load_config("trt-int8", {"target": "mine", "activations.scheme": "asymmetric", "bias": "int32"})
    assert check_limits(config) is config


@pytest.mark.parametrize(
    ("preset", "overrides", "cause"),
    [
        ("ort-int8", {"emit": "nbits"}, "float data"),
        ("ort-int4-weights", {"emit": "nbits", "weights": {"block_size": 24}}, "blocks of 16"),
        ("ort-int8-weights", {"emit": "nbits"}, "blocks of 16"),
        ("ort-int4-weights", {"accuracy_level": 4}, "emit: nbits"),
        ("virtual-int8", {"emit": "nbits"}, "MatMulNBits"),
    ],
)
def test_operators_are_for_weights_alone(preset: str, overrides: dict[str, object], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        load_config(preset, overrides)
