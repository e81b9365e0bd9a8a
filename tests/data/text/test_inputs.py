"""Inputs of models that read tokens: each gets what its name asks for, and others are refused."""

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.data.text import find_text_inputs
from onnxq.errors import DataError
from onnxq.graph import ValueInfo
from onnxq.runtime import Session
from tests.data.text.kit import make_decoder

INT, INT32, F, F16, B = (
    TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL,
)  # fmt: skip
IDS = ValueInfo("input_ids", INT, ("batch", "length"))


def test_an_encoder() -> None:
    parts = find_text_inputs(
        [
            ValueInfo("input_ids", INT32, ("N", 4)),
            ValueInfo("attention_mask", F, ("N", 4)),
            ValueInfo("token_type_ids", INT, ("N", 4)),
        ],
        ["last_hidden_state"],
    )
    feeds = parts.make_feeds(np.array([[5, 6, 7, 8]]))
    assert parts.length == 4
    assert {name: value.dtype.name for name, value in feeds.items()} == {
        "input_ids": "int32", "attention_mask": "float32", "token_type_ids": "int64",
    }  # fmt: skip
    np.testing.assert_array_equal(feeds["attention_mask"], np.ones((1, 4)))
    np.testing.assert_array_equal(feeds["token_type_ids"], np.zeros((1, 4)))


def test_a_merged_decoder_with_caches_by_any_order() -> None:
    cache = ("batch", 2, "past", 8)
    parts = find_text_inputs(
        [
            IDS, ValueInfo("attention_mask", INT, ("batch", "past + length")),
            ValueInfo("position_ids", INT, ("batch", "length")), ValueInfo("cache_position", INT, ("length",)),
            ValueInfo("past_key_values.0.key", F16, cache), ValueInfo("past_key_values.0.value", F16, cache),
            ValueInfo("use_cache_branch", B, (1,)), ValueInfo("num_logits_to_keep", INT, ()),
        ],
        ["logits", "present.0.value", "present.0.key"],
    )  # fmt: skip
    assert [(one.value.name, one.output, one.axis) for one in parts.caches] == [
        ("past_key_values.0.key", "present.0.key", 2),
        ("past_key_values.0.value", "present.0.value", 2),
    ]
    first = parts.make_feeds(np.zeros((1, 3), np.int64))
    assert first["past_key_values.0.key"].shape == (1, 2, 0, 8)
    assert not first["use_cache_branch"].any()
    assert first["num_logits_to_keep"].shape == ()
    known = {name: np.ones((1, 2, 5, 8), np.float16) for name in ("past_key_values.0.key", "past_key_values.0.value")}
    later = parts.make_feeds(np.zeros((1, 2), np.int64), known)
    assert later["attention_mask"].shape == (1, 7)
    np.testing.assert_array_equal(later["position_ids"], [[5, 6]])
    np.testing.assert_array_equal(later["cache_position"], [5, 6])
    np.testing.assert_array_equal(later["use_cache_branch"], [True])


def test_caches_of_other_names_are_continued_in_their_order() -> None:
    past = [ValueInfo(f"past_{k}", F, (2, "batch", 4, "known", 8)) for k in range(2)]
    parts = find_text_inputs([IDS, *past], ["logits", "state_0", "state_1"])
    assert [(one.output, one.axis) for one in parts.caches] == [("state_0", 3), ("state_1", 3)]
    assert parts.make_empty_caches()["past_0"].shape == (2, 1, 4, 0, 8)


def test_a_prompt_in_steps_leaves_the_caches_of_one_run() -> None:
    session = Session(make_decoder())
    parts = find_text_inputs(session.inputs, [value.name for value in session.outputs])
    ids = np.arange(12)[None]
    whole = parts.run_prompt(session, ids)
    fixed = find_text_inputs(
        [ValueInfo(one.name, one.dtype, ("N", 4)) if one.name == "input_ids" else one for one in session.inputs],
        [value.name for value in session.outputs],
    )
    for name, value in fixed.run_prompt(session, ids).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ([ValueInfo("pixels", F, ("N", 3, 8, 8))], [], "'pixels': no text gives its values"),
        ([IDS, ValueInfo("encoder_hidden_states", F, ("N", "T", 8))], [], "'encoder_hidden_states'"),
        ([IDS, ValueInfo("attention_mask", F, ("N", 1, "T", "S"))], [], "'attention_mask'"),
        ([IDS, ValueInfo("decoder_input_ids", INT, ("N", "T"))], [], "2 inputs for tokens"),
        ([IDS, ValueInfo("past.0", F, ("batch", 1, 64, 8))], ["logits", "present.0"], "0 of no fixed size"),
        ([IDS, ValueInfo("past.0", F, ("batch", 1, "P", 8))], ["logits"], "1 caches and 0 outputs"),
    ],
)
def test_inputs_that_no_text_gives(inputs: list[ValueInfo], outputs: list[str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        find_text_inputs(inputs, outputs)
