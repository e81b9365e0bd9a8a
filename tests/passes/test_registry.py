"""The order of all passes, and the names that `skip` may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxq.config import Config, load_config
from onnxq.errors import ConfigError
from onnxq.passes.base import Stage
from onnxq.passes.registry import PASSES, SKIPPABLE, check_skip


def test_names_are_unique():
    assert len({entry.name for entry in PASSES}) == len(PASSES)


def test_stages_follow_each_other():
    order = [Stage.REWRITE, Stage.EQUALIZE, Stage.REFINE]
    places = [order.index(entry.stage) for entry in PASSES]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        # A pass sees what the one in front of it left.
        ("cross_layer_equalization", "bias_absorption"),
        ("bias_absorption", "smoothquant"),
        ("sensitive_ops", "attention"),
        ("weight_bits", "attention"),
        ("attention", "attention_after_rounding"),
        ("attention_after_rounding", "promotion"),
    ],
)
def test_the_order_of_those_that_hang_together(first, then):
    names = [entry.name for entry in PASSES]
    assert names.index(first) < names.index(then)


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
