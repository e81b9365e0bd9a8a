"""How many samples rounding takes, and in which other ways it is shown pictures."""

import numpy as np
import pytest

import onnxq
from onnxq.config import TensorConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.rounding import layerwise as sampling
from onnxq.pipeline.prepared import load_state
from tests.passes.rounding.kit import FOUR
from tests.pipeline.models import images, residual

PLANS = {
    bits: onnxq.make_plan(residual(), images(8), FOUR.model_copy(update={"weights": TensorConfig(bits=bits)}))
    for bits in (8, 4)
}


def test_weights_of_few_bits_get_more_of_large_samples() -> None:
    data = load_data(images(40), GraphIndex(load_state(residual()).model).inputs)
    counts = {}
    for bits, plan in PLANS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_TOO_MANY", 16 * data[0]["x"].size)
            patch.setattr(sampling, "_TOO_MANY_NARROW", 24 * data[0]["x"].size)
            counts[bits] = len(sampling.take_enough(data, plan, "balanced", 0))
    assert counts == {8: 16, 4: 24}


def test_pictures_are_shown_in_other_ways_for_few_bits_only() -> None:
    samples = [{"x": np.random.default_rng(k).random((1, 3, 16, 16), np.float32)} for k in range(4)]
    counts = {}
    for bits, plan in PLANS.items():
        counts[bits] = [len(sampling.augment_samples(samples, plan, skip)) for skip in ((), ("augmented_samples",))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_MOST_AUGMENTED", 13 * samples[0]["x"].size)
            counts[bits].append(len(sampling.augment_samples(samples, plan, ())))
    assert counts == {8: [0, 0, 0], 4: [20, 0, 8]}
    assert sampling.augment_samples([], PLANS[4], ()) == []
