"""Options, progress and results of a reconstruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxq.errors import ConfigError
from onnxq.sites import Refusal

# Method -> default learning rate of activation scales; AdaRound learns none.
METHODS = {"adaround": 0.0, "brecq": 4e-5}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one unit, a layer or a block, is learned.

    iterations: Adam steps per unit. batch: samples per step. lr: of the roundings. activation_lr: of activation scales,
        which follows a cosine to 0; None: 0 for adaround (scales do not change), 4e-5 for brecq.
    regularization: factor of the mean of 1 - |2h - 1|**beta. warm_up: share of the steps without it. beta: start and
        end of its linear decrease afterwards.
    samples: number of samples used. cache_bytes: bytes of memory for the inputs and targets of one unit; the rest is
        kept in a temporary file, which is slower and as exact.
    max_layers: most weights in one block; a region with more is split into the regions inside it.
    seed: the same seed, data and device give the same roundings.
    """

    # AdaRound's paper takes 10 000, BRECQ's 20 000.
    iterations: int = 10_000
    batch: int = 32
    lr: float = 1e-2
    activation_lr: float | None = None
    # The papers add 0.01 times the sum to the squared error, which is too little where outputs are large. Here the
    # error is relative to that of rounding to nearest, so that one factor fits layers of any size and scale.
    regularization: float = 100.0
    # As in BRECQ's published code, for AdaRound too.
    warm_up: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)
    # BRECQ's paper takes 1024 images.
    samples: int = 1024
    cache_bytes: int = 1 << 30
    # Residual and transformer blocks have fewer; stages of a network have more.
    max_layers: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("iterations", "batch", "samples", "max_layers", "lr"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"reconstruction: {name}={getattr(self, name)}", "is not positive", "give 1 or more", code="Q318"
                )
        if not 0 <= self.warm_up < 1:
            raise ConfigError(
                f"reconstruction: warm_up={self.warm_up}", "is no share", "give 0 to below 1", code="Q318"
            )

    def beta_at(self, step: int) -> float | None:
        """The regularizer's exponent at a step; None during the warm-up."""
        first = self.warm_up * self.iterations
        if step < first:
            return None
        start, end = self.beta
        return end + (start - end) * (1 - (step - first) / (self.iterations - first))


@dataclass(frozen=True)
class Progress:
    """Progress of one unit. unit: its name, the index-th of `units`. loss: mean squared error of its output."""

    unit: str
    index: int
    units: int
    iteration: int
    iterations: int
    loss: float


Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """One layer or block. before, after: mean squared error of its output, rounded to nearest and as learned.

    kept: False if learning did not lower the error on the samples, and rounding to nearest was restored.
    spilled: bytes of samples that did not fit into memory.
    """

    name: str
    sites: tuple[str, ...]
    before: float
    after: float
    kept: bool
    samples: int
    spilled: int = 0


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Results unit by unit in the order of computation, and refusals for weights that were not learned."""

    method: str
    units: tuple[UnitResult, ...]
    refusals: tuple[Refusal, ...] = ()
