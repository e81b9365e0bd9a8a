"""The samples that operators are rounded with: how many are held at once, and which other views of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from onnxq.data import Dataset, augment_sample
from onnxq.passes.judging import has_few_bits
from onnxq.plan import Plan
from onnxq.runtime import Feeds

AUGMENTED = "augmented_samples"
_SAMPLES = {"balanced": 32, "high": 64}
# Small samples give few positions and cost little: as many as make up so many input values, up to 128. Large ones give
# many and cost memory: no more than make up so many, and at least 8.
_VALUES, _MOST = 1 << 18, 128
_TOO_MANY, _TOO_MANY_NARROW, _FEWEST = 9 << 18, 1 << 23, 8
# Input values with the augmented samples, which are held as well, but not in the first layers.
_MOST_AUGMENTED = 1 << 25


def take_enough(calibration: Dataset, plan: Plan, effort: str, seed: int) -> Dataset:
    """Samples to go through the network with, all held at once: more where they are small, fewer where large.

    Weights of few bits, for which everything hangs on their rounding, get more of the large ones.
    """
    size = max(sum(value.size for value in calibration[0].values()), 1)
    wanted = max(_SAMPLES[effort], min(_VALUES // size, _MOST))
    most = _TOO_MANY_NARROW if has_few_bits(plan) else _TOO_MANY
    return calibration.take(max(min(wanted, most // size), _FEWEST), seed)


def augment_samples(samples: Sequence[Feeds], plan: Plan, skip: Collection[str]) -> list[Feeds]:
    """Other views of the samples for second moments, of all alike often; none but for weights of few bits.

    See `onnxq.data.augment_sample`.
    """
    if AUGMENTED in skip or not samples or not has_few_bits(plan):
        return []
    # As many of each sample, so that no sample weighs more than the others.
    each = [augment_sample(sample) for sample in samples]
    size = max(sum(np.asarray(value).size for value in samples[0].values()), 1)
    rounds = min(_MOST_AUGMENTED // (size * len(samples)) - 1, *map(len, each))
    return [one[k] for k in range(rounds) for one in each]
