"""From predictions to measurements, and between what holds and what does not."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from onnxq.passes.mixed_precision.rescaling import bisect_noise

NOISES = st.lists(st.floats(1e-9, 1e3), max_size=5)


@given(failing=NOISES, holding=NOISES)
def test_a_noise_lies_between_what_fails_and_what_holds_below(failing: list[float], holding: list[float]) -> None:
    noise = bisect_noise(failing, holding)
    if not failing:
        assert noise == math.inf
        return
    assert noise < min(failing)
    assert all(noise > one for one in holding if one < min(failing) * (1 - 1e-9))
