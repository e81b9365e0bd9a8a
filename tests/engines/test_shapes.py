"""Sizes of inputs of no fixed size: written by people, checked against the model, guessed where none are given."""

import numpy as np
import onnx
import pytest

from onnxq.engines.shapes import list_shapes, make_profile, parse_shapes, warn_guesses
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex
from tests.engines import kit


def test_written_shapes():
    assert parse_shapes(["x:1x3x8x8", "in:0:1,4,16"]) == {
        "x": ((1, 3, 8, 8), (1, 3, 8, 8), (1, 3, 8, 8)),
        "in:0": ((1,), (4,), (16,)),
    }


@pytest.mark.parametrize("text", ["x", "x:", ":1x3", "x:1x3,2x3", "x:1x-3", "x:1×3", "x:axb"])
def test_what_is_no_shape(text):
    with pytest.raises(ConfigError, match="sizes joined by x"):
        parse_shapes([text])


def run(model: onnx.ModelProto, **given):
    return make_profile(GraphIndex(model), {name: tuple(sizes) for name, sizes in given.items()})


def dynamic() -> onnx.ModelProto:
    return kit.graph("(float[N,4,W] x, float[N] k) => (float[N,4,W] y) { y = Relu(x) z = Relu(k) }")


def test_one_symbol_has_one_size_and_fixed_inputs_need_no_profile():
    assert run(kit.conv()) == ({}, ())
    assert run(kit.conv(), x=[(1, 32, 16, 16)] * 3) == ({}, ())
    found, guessed = run(dynamic(), x=[(1, 4, 8), (5, 4, 8), (9, 4, 8)])
    assert found["x"] == ((1, 4, 8), (5, 4, 8), (9, 4, 8))
    assert found["k"] == ((5,), (5,), (5,))
    (warning,) = warn_guesses(found, guessed, "built for")
    assert warning.code == "W112"
    assert warning.startswith("inputs of no fixed size were built for one size: k 5;")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nope": [(1,)] * 3}, "no such input"),
        ({"x": [(1, 5, 8)] * 3}, "does not fit its shape Nx4xW"),
        ({"x": [(1, 4)] * 3}, "does not fit"),
        ({"x": [(4, 4, 8), (1, 4, 8), (8, 4, 8)]}, "growing order"),
    ],
)
def test_shapes_that_do_not_fit(given, said):
    with pytest.raises(ConfigError, match=said):
        run(dynamic(), **given)


def test_an_input_of_unknown_rank_cannot_be_guessed():
    model = kit.graph("(float[N] x) => (float[N] y) { y = Relu(x) }")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ConfigError, match="no size can be guessed"):
        run(model)


def test_the_profile_covers_all_samples():
    index = GraphIndex(kit.conv(batch="N"))
    feeds = [{"x": np.zeros((count, 32, 16, 16), np.float32)} for count in (2, 1, 5)]
    assert list_shapes(index, feeds) == {"x": ((1, 32, 16, 16), (2, 32, 16, 16), (5, 32, 16, 16))}
