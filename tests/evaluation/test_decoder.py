"""A decoder answers the same for a text in one run, in blocks behind caches, and without caches."""

import numpy as np
import pytest

from onnxq.errors import DataError
from onnxq.evaluation.perplexity import Decoder
from onnxq.runtime import Session
from tests.data.text.kit import make_decoder
from tests.networks import parse_text

IDS = np.array([3, 141, 59, 26, 53, 58, 97, 93, 23, 84])


@pytest.fixture(scope="module")
def cached() -> Decoder:
    return Decoder(Session(make_decoder()), "cached")


@pytest.fixture(scope="module")
def plain() -> Decoder:
    return Decoder(Session(make_decoder(caches=False)), "plain")


def test_blocks_and_caches_change_no_answer(cached: Decoder, plain: Decoder) -> None:
    assert (cached.caches, plain.caches) == (True, False)
    whole, _ = plain.run_tokens(IDS)
    for decoder in (cached, plain):
        blocks = list(decoder.read_logits(IDS, 4))
        assert [len(one) for one in blocks] == [4, 4, 2]
        np.testing.assert_allclose(np.concatenate(blocks), whole, rtol=1e-4, atol=1e-4)


def test_generated_tokens_are_the_likeliest_of_runs_of_the_whole_text(cached: Decoder, plain: Decoder) -> None:
    text = list(IDS)
    for _ in range(5):
        text.append(int(plain.run_tokens(np.array(text))[0][-1].argmax()))
    for decoder in (cached, plain):
        assert decoder.generate_tokens(IDS, 5) == text[len(IDS) :]


@pytest.mark.parametrize("caches", [False, True])
def test_a_model_of_one_length_reads_more_and_fewer_tokens(caches: bool, plain: Decoder) -> None:
    proto = make_decoder(caches=caches)
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 2
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    fixed = Decoder(Session(proto), "fixed")
    ids = IDS[: 8 if caches else 3]
    whole, _ = plain.run_tokens(ids)
    np.testing.assert_allclose(fixed.run_tokens(ids)[0], whole, rtol=1e-4, atol=1e-4)


_UNSQUEEZED = """(float[A,N,T] y) {
    f = Cast <to: int = 1> (input_ids) zero = Constant <value_ints: ints = [0]> () y = Unsqueeze (f, zero)
}"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("(int64[N,T] y) { y = Identity (input_ids) }", "has no output of floats"),
        (_UNSQUEEZED, r"'y' is \[1, 1, 10\] for 10 tokens"),
    ],
)
def test_models_without_logits(text: str, told: str) -> None:
    proto = parse_text(f"e (int64[N,T] input_ids) => {text}", opset=20, ir=10)
    with pytest.raises(DataError, match=told):
        Decoder(Session(proto), "m").run_tokens(IDS)
