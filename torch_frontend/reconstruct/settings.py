"""How long, how fast, on how much: the knobs of a reconstruction, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxq.errors import ConfigError
from onnxq.sites import Refusal

METHODS = ("adaround", "brecq")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Learning of one unit, a layer or a block.

    iterations: Adam steps a unit; the papers take 10 000 (AdaRound) and 20 000 (BRECQ). batch: samples a step.
    lr: of the roundings. activation_lr: of activation scales, which follow a cosine to 0; None: 0 for adaround (they
        stay), 4e-5 for brecq.
    regularization, warm_up, beta: factor of the mean of 1 - |2h - 1|**beta, share of the steps without it, and the
        values between which beta falls afterwards. The papers add 0.01 times its sum to the squared error, which
        does too little where outputs are large; here the error counts in units of that of rounding to nearest, so
        that one factor fits layers of any size and scale.
    samples: how many of the data's samples are used. cache_bytes: what the inputs and targets of one unit may take in
        memory; the rest is kept in a temporary file, which is slower and as exact.
    max_layers: weights in one block; a region with more is taken apart into the regions inside it.
    seed: the same seed, data and device give the same roundings.
    """

    iterations: int = 10_000
    batch: int = 32
    lr: float = 1e-2
    activation_lr: float | None = None
    regularization: float = 100.0
    warm_up: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)
    samples: int = 1024
    cache_bytes: int = 1 << 30
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
        """The regulariser's exponent; None during the warm-up."""
        first = self.warm_up * self.iterations
        if step < first:
            return None
        start, end = self.beta
        return end + (start - end) * (1 - (step - first) / (self.iterations - first))


@dataclass(frozen=True)
class Progress:
    """Where the learning stands. unit: its name, the index-th of `units`; loss: its output's mean squared error now."""

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

    kept: False where learning did not lower the error on the samples, and rounding to nearest was put back.
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
    """What was learned, unit by unit in the order of computation, and what was not and why."""

    method: str
    units: tuple[UnitResult, ...]
    refusals: tuple[Refusal, ...] = ()
