"""The order of all passes, the names that `skip` may hold, and how directly the spine of a run calls them."""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.passes.base import Stage, run_stage
from onnxq.passes.registry import PASSES, SKIPPABLE, check_skip
from onnxq.passes.rounding.gptq_core import round_with_feedback, round_within_sums
from onnxq.passes.rounding.low_bit_core import round_low_bit
from onnxq.passes.rounding.passes import round_weights
from onnxq.pipeline import quantize_model
from tests.pipeline.models import images, residual


def test_names_are_unique_and_stages_follow_each_other():
    assert len({entry.name for entry in PASSES}) == len(PASSES)
    order = [Stage.REWRITE, Stage.EQUALIZE, Stage.REFINE]
    places = [order.index(entry.stage) for entry in PASSES]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}


@pytest.mark.parametrize(
    "row",
    [
        # A pass sees what the one in front of it left.
        ("cross_layer_equalization", "bias_absorption", "smoothquant"),
        ("sensitive_ops", "attention", "attention_after_rounding", "promotion"),
        ("weight_bits", "attention"),
    ],
)
def test_the_order_of_those_that_hang_together(row):
    assert [entry.name for entry in PASSES if entry.name in row] == [*row]


def test_what_takes_long_is_announced():
    assert [entry.name for entry in PASSES if bool(entry.title) == (entry.stage is Stage.REWRITE)] == []
    assert all(entry.title and entry.time_share <= 1 for entry in PASSES if entry.time_share)


def test_every_pass_and_augmented_samples_may_be_skipped():
    assert {entry.name for entry in PASSES} < SKIPPABLE
    assert SKIPPABLE - {entry.name for entry in PASSES} == {"augmented_samples"}
    check_skip(Config(skip=tuple(sorted(SKIPPABLE))))
    check_skip(Config())


def test_an_unknown_name_is_refused_with_its_place_and_a_name_like_it(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("target: ort\nskip:\n  - smoothquant\n  - biasabsorption\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_skip(load_config(path))
    error = caught.value
    assert error.code == "Q320"
    assert "config.yaml" in error.subject
    assert "4" in error.subject
    assert "no pass is called 'biasabsorption'" in error.cause
    assert "bias_absorption" in error.fix


def test_a_name_like_none_is_refused_with_all_there_are():
    with pytest.raises(ConfigError) as caught:
        check_skip(Config(skip=("zzzz",)))
    assert caught.value.fix == f"known: {', '.join(sorted(SKIPPABLE))}"


# ---- The layers between the spine of a run and its passes, and between a pass and its algorithm.

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
    spine = quantize_model.quantize.__code__
    watched = {function.__code__ for function in (run_stage, round_weights, algorithm)}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in watched:
            depths.setdefault(frame.f_code, set()).add(count_frames(frame, spine))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        onnxq.quantize(residual(), images(8), preset, overrides={"latency": False, "skip": OTHERS})
    finally:
        sys.setprofile(before)
    assert depths[round_weights.__code__] == {2}
    assert depths[algorithm.__code__] == {4}
