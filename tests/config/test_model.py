"""The configuration as a value."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config import TensorConfig, load_config
from onnxq.errors import ConfigError
from onnxq.spec import PerBlock, PerChannel, PerTensor


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_where_knows_the_line_of_what_was_written(tmp_path):
    path = write(tmp_path, "weights:\n  observer: mse\n")
    found = load_config(path)
    assert str(found.where("weights.observer")) == f"{path}:2: weights.observer"
    assert str(found.where("activations.observer")) == "activations.observer"


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
    path = write(tmp_path_factory.mktemp("c"), json.dumps({"weights": wish}))
    found = load_config(path).weights
    assert found == TensorConfig(**wish)
    spec = found.spec(axis)
    grain = {"tensor": PerTensor(), "channel": PerChannel(axis), "block": PerBlock(axis, 32)}[wish["granularity"]]
    signed = wish["scheme"] == "symmetric" if wish["signed"] is None else wish["signed"]
    assert (spec.bits, spec.symmetric, spec.signed, spec.granularity) == (
        wish["bits"],
        wish["scheme"] == "symmetric",
        signed,
        grain,
    )


def test_spec_without_the_axis_it_needs_is_an_error():
    with pytest.raises(ConfigError, match="no channel axis"):
        TensorConfig(granularity="channel").spec(None)


def test_config_is_frozen_and_hashable():
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.target = "trt"
    assert hash(config.weights) == hash(load_config().weights)
