"""The configuration as a value: its own keys, and those of its sections."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config import Config, MultiInput, QuantizerSpec, TensorConfig, read_config
from onnxq.errors import ConfigError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor
from tests.config.kit import read, write

wishes = st.builds(
    dict,
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16]),
    scheme=st.sampled_from(["symmetric", "asymmetric"]),
    signed=st.sampled_from([None, True, False]),
    granularity=st.sampled_from(["tensor", "channel", "block"]),
    observer=st.one_of(
        st.sampled_from(["minmax", "mse"]),
        st.fixed_dictionaries({"name": st.just("percentile"), "percentile": st.floats(90, 100)}),
    ),
)


@given(wishes, st.integers(0, 3))
def test_any_wish_survives_a_file_and_gives_its_spec(tmp_path_factory, wish, axis):
    if wish["granularity"] == "block":
        wish = {**wish, "block_size": 32}
    found = read(tmp_path_factory.mktemp("c"), json.dumps({"weights": wish})).weights
    assert found == TensorConfig(**wish)
    spec = found.spec(axis)
    grain = {"tensor": PerTensor(), "channel": PerChannel(axis), "block": PerBlock(axis, 32)}[wish["granularity"]]
    signed = wish["scheme"] == "symmetric" if wish["signed"] is None else wish["signed"]
    wanted = (wish["bits"], wish["scheme"] == "symmetric", signed, grain)
    assert (spec.bits, spec.symmetric, spec.signed, spec.granularity) == wanted


def test_spec_without_the_axis_it_needs_is_an_error():
    with pytest.raises(ConfigError, match="no channel axis"):
        TensorConfig(granularity="channel").spec(None)


def test_config_is_frozen_and_hashable():
    config = read_config()
    with pytest.raises(ValueError, match="frozen"):
        config.target = "trt"
    assert hash(config.weights) == hash(read_config().weights)


FULL = """target: trt
mode: static
activations: {bits: 8, scheme: symmetric, signed: true, granularity: tensor, observer: {name: mse}}
weights: {bits: 8, narrow_range: true, granularity: channel}
bias: float
saturation: allow
attention: auto
effort: high
weight_bits: 8
skip: [smoothquant, bias_absorption]
rules:
  - node: [stem, /head/]
    role: [weight, output]
    scope: If_0.*
    set: {bits: 8, observer: mse}
  - between: [a, b]
    set: {float: true}
"""


def test_every_key_is_read(tmp_path):
    config = read(tmp_path, FULL)
    assert (config.target, config.bias, config.saturation, config.attention) == ("trt", "float", "allow", "auto")
    assert (config.effort, config.weight_bits, config.skip) == ("high", (8,), ("smoothquant", "bias_absorption"))
    first, second = config.rules
    assert (first.node, first.role, first.scope) == (("stem", "/head/"), (Role.WEIGHT, Role.OUTPUT), ("If_0.*",))
    assert (first.set.bits, first.set.observer) == (8, ObserverSpec("mse"))
    assert (second.between, second.set.float) == (("a", "b"), True)
    assert config.weights.narrow_range
    assert config.activations.is_signed


TRAINED = """
target: virtual
torch:
  weights: {quantizer: lsq}
  activations:
    quantizer: {name: pact, alpha: 8.0, signed: true}
  skip_trace: [head, "blocks.*"]
  multi_input: {cat: share, add: insert, mul: {follow: 1}, sub: follow, matmul: none}
  fuse_bn: false
  disable_redundant: false
rules:
  - node: stem
    set: {quantizer: uniform}
  - node: fc
    set: {bits: 8, quantizer: {name: lsq, symmetric_init: true}}
"""


@pytest.mark.parametrize("again", ["dump", "override", "pickle", "copy"])
@pytest.mark.parametrize("text", [FULL, TRAINED], ids=["full", "torch"])
def test_a_configuration_survives(tmp_path, again, text):
    config = read(tmp_path, text)
    if again == "dump":
        other = Config.model_validate(config.model_dump())
    elif again == "override":
        other = read_config(config, {"data.seed": 0})
        # The places of the file are kept, so that later errors name its lines.
        assert str(other.where("rules[1]")) == f"{tmp_path / 'c.yaml'}:{16 if text == FULL else 14}: rules[1]"
    elif again == "pickle":
        other = pickle.loads(pickle.dumps(config))
    else:
        other = config.model_copy(update={"effort": config.effort})
    assert other.model_dump() == config.model_dump()
    assert hash(other) == hash(config)


def test_images_square_size_and_defaults(tmp_path: Path) -> None:
    images = read(tmp_path, "data:\n  images: {size: 224, mean: [0.5], std: [0.2]}\n").data.images
    assert images is not None
    assert (images.size, images.range, images.mean, images.crop) == ((224, 224), (0.0, 1.0), (0.5,), "center")


@pytest.mark.parametrize(
    ("given", "field", "found"),
    [
        ({"size": [32, 64]}, "size", (32, 64)),
        ({"resize": 40}, "resize", 40),
        ({"crop": "pad", "fill": 114}, "fill", 114),
        ({"color": "GRAY", "mean": [0.1], "std": [0.3]}, "std", (0.3,)),
        ({"color": "BGR", "mean": [1, 2, 3]}, "mean", (1.0, 2.0, 3.0)),
        ({"range": [-1, 1]}, "range", (-1.0, 1.0)),
        ({"layout": "NHWC", "interpolation": "lanczos"}, "layout", "NHWC"),
        ({"input": "pixels"}, "input", "pixels"),
    ],
)
def test_every_key_of_images(given: dict[str, Any], field: str, found: object) -> None:
    images = read_config(None, {"data.images": {"size": 4, **given}}).data.images
    assert getattr(images, field) == found


def test_libraries_of_a_chain_of_files_come_together(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    write(tmp_path / "ops", "runtime: {libraries: base.so}", "base.yaml")
    top = write(tmp_path, "extends: ops/base.yaml\nruntime: {libraries: [top.so, /abs.so]}")
    found = read_config(top, {"runtime.libraries": "more.so"}).runtime.libraries
    assert found == ("more.so", str(tmp_path / "top.so"), "/abs.so", str(tmp_path / "ops" / "base.so"))


def test_every_key_of_the_front_end_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, TRAINED)
    front = config.torch
    assert front.weights.quantizer == QuantizerSpec("lsq")
    assert front.activations.quantizer == QuantizerSpec("pact", (("alpha", 8.0), ("signed", True)))
    assert front.skip_trace == ("head", "blocks.*")
    assert front.policy("mul") == MultiInput("follow", 1)
    assert front.policy("sub") == MultiInput("follow", 0)
    assert [front.policy(op).policy for op in ("cat", "add", "matmul")] == ["share", "insert", "none"]
    assert front.policy("div") is None
    assert not front.fuse_bn
    assert read_config(config, {"torch.fuse_bn": True}).torch.fuse_bn
    assert not front.disable_redundant
    assert config.rules[0].set.quantizer == QuantizerSpec("uniform")
    assert config.rules[1].set.quantizer == QuantizerSpec("lsq", (("symmetric_init", True),))
    assert "quantizer=uniform" in config.rules[0].describe()


def test_a_quantizer_is_not_mixed_with_an_inherited_ones_options(tmp_path: Path) -> None:
    write(tmp_path, "torch: {activations: {quantizer: {name: pact, alpha: 8.0}}}\n", "base.yaml")
    config = read(tmp_path, "extends: base.yaml\ntorch: {activations: {quantizer: {name: lsq}}}\n")
    assert config.torch.activations.quantizer == QuantizerSpec("lsq")
