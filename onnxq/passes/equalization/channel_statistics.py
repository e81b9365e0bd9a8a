"""Statistics of tensors, channel by channel, over samples: smallest and largest values, some rows. All streaming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.arrays import Floats
from onnxq.calibrate import DEFAULT_MEMORY_LIMIT
from onnxq.calibrate.taps import Taps
from onnxq.data import Batch, Dataset, read_mask
from onnxq.graph import ModelLike
from onnxq.passes.equalization.smoothquant_core import ChannelStatistics
from onnxq.progress import Progress
from onnxq.runtime import Feeds
from onnxq.sites import TensorId

# Batches among which the largest is looked for, which says how many tensors fit into memory at a time.
_LOOK_AHEAD = 16


def observe_channels(
    proto: ModelLike,
    axes: Mapping[TensorId, int],
    dataset: Dataset,
    *,
    progress: Progress,
    title: str,
    rows: int = 0,
    batch: int | None = None,
    memory_limit: int | None = None,
) -> dict[TensorId, ChannelStatistics]:
    """Low and high end of each channel along `axes`, and `rows` of its rows spread over the samples.

    A tensor that no sample reached, that cannot be observed or that held NaN or inf is not in the result.
    Raises ModelError and DataError from the runs.
    """
    if not axes:
        return {}
    taps = Taps(proto, list(axes), DEFAULT_MEMORY_LIMIT if memory_limit is None else memory_limit)
    if not taps.tensors:
        return {}
    batches = islice(dataset.batches(batch), _LOOK_AHEAD)
    groups = taps.groups(max(batches, key=lambda part: sum(value.size for value in part.feeds.values())))
    share = -(-rows // len(dataset)) if rows else 0
    running: dict[TensorId, _RunningStatistics] = {}

    def singles(part: Batch) -> Iterable[Feeds]:
        return (dataset[k] for k in range(part.first_index, part.first_index + part.count))

    with progress(title, len(groups) * len(dataset)) as task:
        for group in groups:
            last = -1
            for part, tensor, value in taps.run(group, dataset.batches(batch), singles):
                axis = axes[tensor]
                statistics = running.setdefault(tensor, _RunningStatistics(value.shape[axis], rows))
                statistics.extend_range(value, axis)
                if share:
                    flat = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
                    mask = read_mask(part.feeds, value.shape)
                    statistics.keep_rows(flat if mask is None else flat[mask.reshape(-1)], share * part.count)
                # A part comes once for each tensor of the group.
                if part.first_index != last:
                    task.advance(part.count)
                    last = part.first_index
    finished = {tensor: statistics.finish() for tensor, statistics in running.items()}
    return {tensor: statistics for tensor, statistics in finished.items() if statistics is not None}


class _RunningStatistics:
    def __init__(self, channels: int, rows: int) -> None:
        self.low = np.full(channels, np.inf)
        self.high = np.full(channels, -np.inf)
        self.rows: list[Floats] = []
        self.left = rows

    def extend_range(self, value: NDArray[np.floating[Any]], axis: int) -> None:
        """value: channels along `axis`."""
        others = tuple(k for k in range(value.ndim) if k != axis % value.ndim)
        self.low = np.minimum(self.low, value.min(axis=others))
        self.high = np.maximum(self.high, value.max(axis=others))

    def keep_rows(self, values: NDArray[np.floating[Any]], share: int) -> None:
        """Keep up to `share` rows, evenly spread, of values [positions, channels] without padding."""
        take = min(share, self.left, len(values))
        if take:
            picked = np.linspace(0, len(values) - 1, take).astype(int)
            self.rows.append(values[picked].astype(np.float32))
            self.left -= take

    def finish(self) -> ChannelStatistics | None:
        # Also where no sample reached it: the ends are still infinite.
        if not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            return None
        rows = np.concatenate(self.rows) if self.rows else np.zeros((0, self.low.size), np.float32)
        return ChannelStatistics(self.low, self.high, rows)
