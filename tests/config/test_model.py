"""The configuration as a value."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config import Config, TensorConfig, read_config
from onnxq.errors import ConfigError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor, QuantSpec
from tests.config.kit import read

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


@pytest.mark.parametrize("again", ["dump", "override", "pickle", "copy"])
def test_a_configuration_survives(tmp_path, again):
    config = read(tmp_path, FULL)
    if again == "dump":
        other = Config.model_validate(config.model_dump())
    elif again == "override":
        other = read_config(config, {"data.seed": 0})
        # The places of the file are kept, so that later errors name its lines.
        assert str(other.where("rules[1].between")) == f"{tmp_path / 'c.yaml'}:16: rules[1].between"
    elif again == "pickle":
        other = pickle.loads(pickle.dumps(config))
    else:
        other = config.model_copy(update={"effort": "high"})
    assert other.model_dump() == config.model_dump()
    assert hash(other) == hash(config)


@pytest.mark.parametrize(
    ("wish", "spec"),
    [
        ({}, QuantSpec()),
        ({"scheme": "asymmetric"}, QuantSpec(signed=False, symmetric=False)),
        ({"signed": False}, QuantSpec(signed=False)),
        ({"bits": 4, "storage": "int4"}, QuantSpec(bits=4, storage="int4")),
        ({"storage": "float8e4m3fn"}, QuantSpec(storage="float8e4m3fn")),
        ({"bits": 16}, QuantSpec(bits=16)),
        ({"narrow_range": True}, QuantSpec(narrow_range=True)),
        ({"granularity": "channel"}, QuantSpec(granularity=PerChannel(1))),
        ({"granularity": "block", "block_size": 8}, QuantSpec(granularity=PerBlock(1, 8))),
    ],
)
def test_a_wish_is_a_spec(wish, spec):
    assert TensorConfig(**wish).spec(1) == spec


def test_names_and_lists_of_one_are_the_same():
    one, many = (read_config(None, {"skip": given, "weight_bits": 4}) for given in ("rounding", ["rounding"]))
    assert one == many
    assert (one.skip, one.weight_bits) == (("rounding",), (4,))


def test_any_name_is_a_target_until_it_is_looked_up():
    assert read_config("virtual-int8", {"target": "my-engine"}).target == "my-engine"
