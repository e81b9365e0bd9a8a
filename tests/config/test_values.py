"""Patterns of names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config import matches_any

CASES = [
    ("conv*", "conv_1", True),
    ("conv*", "my_conv_1", False),
    ("*conv*", "my_conv_1", True),
    ("Conv", "conv", False),
    ("/conv$/", "my_conv", True),
    ("/conv$/", "conv_1", False),
    ("/^(Conv|Gemm)$/", "Gemm", True),
    ("/encoder/*", "/encoder/layer.0/MatMul", True),
    ("/encoder/*", "x/encoder/layer.0", False),
    ("features[0]", "features[0]", True),
    ("features[0]", "features0", True),
    ("conv_?", "conv_1", True),
]


@pytest.mark.parametrize(("pattern", "name", "selected"), CASES)
def test_globs_cover_the_whole_name_and_regexes_any_part(pattern, name, selected):
    assert matches_any(pattern, name) is selected


def test_no_pattern_selects_everything_and_several_are_alternatives():
    assert matches_any((), "anything")
    assert matches_any(("a", "b*"), "bc")
    assert not matches_any(("a", "b*"), "c")


@given(st.text(min_size=1).filter(lambda s: not (len(s) > 2 and s.startswith("/") and s.endswith("/"))))
def test_every_name_selects_itself(name):
    assert matches_any(name, name)
