"""First qparams from observed tensors: the bridge to `onnxq.observers`, which work on numpy arrays."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from onnxq import numerics, observers
from onnxq.arrays import Floats
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerTensor, QParams, QuantSpec


class Statistics(Protocol):
    """Streaming statistics of one site, and the qparams they give."""

    def update(self, x: Tensor) -> None:
        """Add one tensor."""

    def merge(self, other: Any) -> None:
        """Add the statistics of another rank; associative and commutative."""

    def qparams(self) -> QParams:
        """Qparams of all observed tensors. Raises CalibrationError if there were none."""


def to_numpy(x: Tensor) -> Floats:
    """The values as float32 on the host."""
    return x.detach().float().cpu().numpy()


class ActivationRange:
    """Streaming observers: one, or one per channel."""

    def __init__(self, spec: QuantSpec, observer: ObserverSpec, site: str) -> None:
        if spec.has_blocks:
            raise ConfigError(
                site,
                "activations cannot be quantized per block",
                "ask for granularity: tensor",
                code="Q316",
            )
        self.spec = spec
        self.observer = observer
        # Raises ConfigError for a wrong name or option, before any batch.
        observers.create_observer(observer, spec)
        self._channels: list[observers.Observer] = []

    def update(self, x: Tensor) -> None:
        """Add a batch [N, ...]; observers that count samples get them one by one."""
        if not x.numel():
            return
        values = to_numpy(x)
        parts = [values]
        if self.spec.has_channels:
            parts = list(np.moveaxis(values, self.spec.granularity.axis, 0))
        # The number of channels is known with the first batch only.
        if not self._channels:
            alone = replace(self.spec, granularity=PerTensor())
            self._channels = [observers.create_observer(self.observer, alone) for _ in parts]
        if len(parts) != len(self._channels):
            raise CalibrationError(
                "activation",
                f"has {len(parts)} channels here and had {len(self._channels)} before",
                "quantize it per tensor, or name the axis that does not change",
            )
        for observer, part in zip(self._channels, parts, strict=True):
            # Their ranges must not depend on the batch size.
            for piece in part if observer.per_sample and part.ndim else [part]:
                observer.update(piece)

    def merge(self, other: ActivationRange) -> None:
        """Merge the observers, channel by channel."""
        if not self._channels:
            self._channels = copy.deepcopy(other._channels)
        elif other._channels:
            for mine, theirs in zip(self._channels, other._channels, strict=True):
                mine.merge(theirs)

    def qparams(self) -> QParams:
        """Qparams of the observed range."""
        if not self._channels:
            raise observers.base.make_empty_error(self.observer.name)
        ends = [observer.range() for observer in self._channels]
        low, high = ends[0] if self.spec.has_one_scale else map(np.stack, zip(*ends, strict=True))
        return numerics.qparams_from_range(low, high, self.spec, origin=self.observer.name)


class WeightRange:
    """The last observed weight, whose range is computed in `qparams`.

    orders: the 16-bit sums it keeps; its scales are made wide enough for them.
    """

    def __init__(
        self,
        spec: QuantSpec,
        observer: ObserverSpec,
        orders: Sequence[numerics.SumOrder] = (),
    ) -> None:
        self.spec = spec
        self.observer = observer
        self.orders = orders
        # Raises ConfigError for a wrong observer.
        numerics.weight_qparams(np.zeros(1), QuantSpec(), observer=observer)
        self.weight: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Keep a reference to the weight, without a copy."""
        self.weight = x.detach()

    def merge(self, other: WeightRange) -> None:
        """Take the other rank's weight if there is none here."""
        # A weight is the same on every rank.
        if self.weight is None:
            self.weight = other.weight

    def read_weight(self) -> Tensor:
        """The last observed weight. Raises CalibrationError if there is none, or if it holds NaN or inf."""
        if self.weight is None:
            raise observers.base.make_empty_error("weight")
        if not self.weight.isfinite().all():
            raise CalibrationError(
                "weight", "holds NaN or inf", "repair the float model", code="Q503"
            )
        return self.weight

    def qparams(self) -> QParams:
        """Qparams of the weight by the observer "minmax" or "mse"."""
        values = to_numpy(self.read_weight())
        return numerics.weight_qparams(
            values, self.spec, observer=self.observer, orders=self.orders
        )


def range_statistics(
    spec: QuantSpec,
    observer: ObserverSpec,
    role: Role,
    site: str,
    orders: Sequence[numerics.SumOrder] = (),
) -> Statistics:
    """Collector of the observer's range for an activation or a weight. orders: the 16-bit sums that a weight keeps."""
    if role.is_weight:
        return WeightRange(spec, observer, orders)
    return ActivationRange(spec, observer, site)
