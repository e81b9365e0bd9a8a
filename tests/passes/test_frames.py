"""The layers between the spine of a run and its passes, and between a pass and its algorithm."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import pytest

import onnxq
from onnxq.passes.base import Stage
from onnxq.passes.registry import PASSES
from onnxq.passes.rounding.gptq_core import round_with_feedback, round_within_sums
from onnxq.passes.rounding.low_bit_core import round_low_bit
from onnxq.passes.rounding.passes import round_weights
from onnxq.passes.runner import run_stage
from onnxq.pipeline import quantize_model
from tests.pipeline.models import images, residual

# Passes that are not looked at, which take longest.
OTHERS = [entry.name for entry in PASSES if entry.stage is not Stage.REWRITE and entry.name != "rounding"]


def count_frames(frame: FrameType | None, spine: CodeType) -> int | None:
    """Calls from the spine to a frame; None outside the spine."""
    count = 0
    while frame is not None and frame.f_code is not spine:
        frame, count = frame.f_back, count + 1
    return None if frame is None else count


@pytest.mark.parametrize(
    ("preset", "algorithm"),
    [("virtual-int8", round_with_feedback), ("ort-int8", round_within_sums), ("ort-w4a8", round_low_bit)],
)
def test_two_frames_to_a_pass_and_four_to_its_algorithm(preset: str, algorithm: Any) -> None:
    depths: dict[CodeType, set[int | None]] = {}
    watched = {function.__code__ for function in (run_stage, round_weights, algorithm)}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in watched:
            depths.setdefault(frame.f_code, set()).add(count_frames(frame, quantize_model._quantize.__code__))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        onnxq.quantize(residual(), images(8), preset, overrides={"latency": False, "skip": OTHERS})
    finally:
        sys.setprofile(before)
    assert depths[round_weights.__code__] == {2}
    assert depths[algorithm.__code__] == {4}
