"""Distributions of tensors over samples: histograms, and the largest magnitude of each channel."""

from collections.abc import Iterable

import numpy as np

from onnxq.annotate import PairInfo
from onnxq.arrays import Array, Array64, Interval, list_other_axes
from onnxq.calibrate.taps import Taps
from onnxq.data import Dataset
from onnxq.graph import ModelLike, get_index
from onnxq.observers import Histogram
from onnxq.observers.base import Values
from onnxq.progress import Progress, count_items
from onnxq.sites import MaybeTensor
from onnxq.spec import PerChannel

# Intervals of a histogram, and channels or groups of neighbouring ones.
BINS = 32
CHANNELS = 16
# Of the histogram behind it, which grows with its data.
_FINE = 1024


class Distribution:
    """The values of a tensor. axis: of its channels; None where it has none."""

    def __init__(self, axis: int | None) -> None:
        self.axis = axis
        self.largest: Array = np.zeros(0, np.float32)
        self._histogram = Histogram(_FINE)

    def add_weight(self, weight: Array, outputs: int) -> None:
        """Count a weight whose channels share a scale by `outputs`: the others against the largest of their output."""
        self.add_values(weight)
        inputs = 1 - outputs
        if weight.ndim < 2 or weight.shape[inputs] < 2:
            return
        others = list_other_axes(weight, outputs)
        # The floor keeps dead outputs, which are all zeros, at shares of 0.
        shares = abs(weight) / np.maximum(
            abs(weight).max(axis=others, keepdims=True), np.float32(1e-30)
        )
        self.largest = shares.max(axis=list_other_axes(weight, inputs))

    def add_values(self, array: Array) -> None:
        """Count the values of one sample. What is not finite is left out."""
        flat = np.ascontiguousarray(array, np.float32).ravel()
        flat = flat[np.isfinite(flat)]
        if not flat.size:
            return
        self._histogram.count_values(Values(flat, float(flat.min()), float(flat.max())))
        if self.axis is not None and array.ndim > 1:
            largest = abs(array).max(axis=list_other_axes(array, self.axis % array.ndim))
            same = largest.shape == self.largest.shape
            self.largest = np.maximum(largest, self.largest) if same else largest

    @property
    def counted(self) -> bool:
        """True when there were values."""
        return self._histogram.count > 0

    def count_bars(self) -> tuple[float, float, tuple[int, ...]]:
        """The smallest value, the largest, and the counts of intervals of equal width between them."""
        edges, totals = self._add_up_counts()
        bounds = np.linspace(edges[0], edges[-1], BINS + 1)
        # Bins on a bound are shared by the part of their width on either side.
        counts = np.diff(np.rint(np.interp(bounds, edges, totals)))
        return float(edges[0]), float(edges[-1]), tuple(map(int, counts))

    def measure_clipped(self, chosen: Interval) -> float:
        """The share of values outside a range."""
        edges, totals = self._add_up_counts()
        low, high = np.interp(chosen, edges, totals)
        return float(1 - (high - low) / totals[-1])

    def find_middle(self) -> float | None:
        """The largest magnitude of the channel in the middle; None for fewer than two."""
        return float(np.median(self.largest)) if self.largest.size > 1 else None

    def list_channels(self) -> tuple[float, ...]:
        """The largest magnitudes of channels, of groups of neighbours where there are many."""
        groups = (
            np.array_split(self.largest, min(CHANNELS, self.largest.size))
            if self.largest.size
            else []
        )
        return tuple(float(f"{group.max():.3g}") for group in groups)

    def _add_up_counts(self) -> tuple[Array64, Array64]:
        """Edges, strictly rising, and the count of all below each, zeros in the bin around zero or beside it."""
        view = self._histogram.make_view()
        edges = view.edges
        counts = view.counts.astype(np.float64)
        if view.zeros:
            place = np.searchsorted(edges, 0.0, side="right") - 1
            counts[np.clip(place, 0, counts.size - 1)] += view.zeros
        if edges[0] == edges[-1]:
            # A tensor of one value.
            edges = edges + np.linspace(0.0, max(abs(edges[0]), 1e-6) * 1e-6, edges.size)
        return edges, np.concatenate(([0], counts.cumsum()))


def observe_distributions(
    model: ModelLike,
    pairs: Iterable[tuple[PairInfo, MaybeTensor]],
    samples: Dataset,
    progress: Progress,
) -> dict[MaybeTensor, Distribution]:
    """The distributions of tensors of a float model that pairs quantize: of weights, and of activations on samples.

    pairs: each with its tensor in the float model; None where that has none.
    """
    index = get_index(model)
    distributions: dict[MaybeTensor, Distribution] = {}
    for pair, tensor in pairs:
        if tensor is None or tensor in distributions or pair.role.is_bias:
            continue
        weight = index.find_constant(tensor)
        if weight is not None:
            grain = pair.granularity
            axis = grain.axis if isinstance(grain, PerChannel) and grain.axis < 2 else 0
            distributions[tensor] = Distribution(None)
            distributions[tensor].add_weight(weight, axis)
        elif not tensor.scope and index.find_dtype(tensor):
            rank = len(index.find_shape(tensor) or ())
            # Channels stand behind the batch of images, and last elsewhere.
            distributions[tensor] = Distribution(1 if rank == 4 else -1 if rank > 1 else None)
    computed = [tensor for tensor in distributions if tensor and not index.is_constant(tensor)]
    if not computed:
        return distributions
    taps = Taps(model, computed)
    groups = taps.form_groups(samples.batches())
    with progress("looking at the values", len(groups) * len(samples)) as task:
        for group in groups:
            batches = count_items(samples.batches(), task)
            for _, tensor, value in taps.run(group, batches, samples):
                if value.dtype.kind == "f":
                    distributions[tensor].add_values(value)
    return distributions
