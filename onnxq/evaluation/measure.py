"""Errors of many settings of one switchboard, over samples one after another; only sums are kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxq.evaluation.compare import Array, Comparison, paired_outputs
from onnxq.evaluation.toggled import Switch, Switchboard
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session

Setting = frozenset[Switch]


@dataclass(eq=False)
class Errors:
    """One setting's outputs against the float model's, summed over samples."""

    outputs: dict[str, Comparison] = field(default_factory=dict)
    _each: dict[str, list[float]] = field(default_factory=dict)

    def update(self, feeds: Feeds, reference: Mapping[str, Array], got: Mapping[str, Array]) -> None:
        """Add one run. Strings do not count, nor does what the model's own mask input leaves out."""
        for name, beside in paired_outputs(feeds, reference, got):
            sums = self.outputs.setdefault(name, Comparison(name))
            before = sums.noise
            for one, two in beside:
                sums.update(one, two)
            self._each.setdefault(name, []).append(sums.noise - before)

    def noise(self) -> float:
        """Noise power over signal power, the mean of all outputs; inf when an output is not finite."""
        ratios = [10.0 ** (-one.result().sqnr_db / 10.0) for one in self.outputs.values()]
        return math.fsum(ratios) / len(ratios) if ratios else 0.0

    def sqnr_db(self) -> dict[str, float]:
        """dB of each output."""
        return {name: one.result().sqnr_db for name, one in self.outputs.items()}

    def worst_db(self) -> float:
        """dB of the worst output; inf when nothing differs."""
        return min(self.sqnr_db().values(), default=math.inf)

    def likely_db(self) -> float:
        """What as many other samples are likely to have, dB of the worst output: the mean noise and one standard error.

        One sample says nothing of others: twice its noise.
        """
        found = [math.inf]
        for name, one in self.outputs.items():
            each, plain = self._each[name], one.result().sqnr_db
            mean = math.fsum(each) / len(each)
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else mean
            worse = 10.0 * math.log10(1.0 + error / mean) if mean > 0 else 0.0
            found.append(plain - worse)
        return min(found)


def measure(
    board: Switchboard,
    reference: Session,
    samples: Iterable[Feeds],
    settings: Sequence[Setting],
    *,
    progress: Progress,
    title: str = "profiling",
    count: int | None = None,
) -> list[Errors]:
    """The errors of every setting, in order. samples run one after another, each through all settings.

    count: how many samples there are, for the time left. Raises ModelError and DataError from the runs.
    """
    found = [Errors() for _ in settings]
    distinct: dict[Setting, int] = {}
    for k, setting in enumerate(settings):
        distinct.setdefault(setting, k)
    with progress(title, None if count is None else count * len(distinct)) as task:
        for feeds in samples:
            wanted = reference.run(feeds)
            for setting, k in distinct.items():
                found[k].update(feeds, wanted, board.run(feeds, setting))
                task.advance()
    return [found[distinct[setting]] for setting in settings]
