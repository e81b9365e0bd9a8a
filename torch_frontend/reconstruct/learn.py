"""Learning of one unit: its weights' roundings, and its activations' scales, towards its output in float."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn

from onnxq.errors import ConfigError
from onnxq.sites import Names, Refusals
from torch_frontend.quantizers import AdaRound, Quantizer, Uniform, quantizers_of
from torch_frontend.reconstruct.cache import Record, UnitCache, Values
from torch_frontend.reconstruct.units import Unit

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
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(
                    f"reconstruction: {name}={value}",
                    "is not positive",
                    "give 1 or more",
                    code="Q318",
                )
        if not 0 <= self.warm_up < 1:
            raise ConfigError(
                f"reconstruction: warm_up={self.warm_up}",
                "is no share",
                "give 0 to below 1",
                code="Q318",
            )

    def beta_at(self, step: int) -> float | None:
        """The regularizer's exponent at a step; None during the warm-up."""
        first = self.warm_up * self.iterations
        if step < first:
            return None
        start, end = self.beta
        return end + (start - end) * (1 - (step - first) / (self.iterations - first))


@dataclass(frozen=True)
class LearningProgress:
    """Progress of one unit. unit: its name, the index-th of `units`. loss: mean squared error of its output."""

    unit: str
    index: int
    units: int
    iteration: int
    iterations: int
    loss: float


Report = Callable[[LearningProgress], None]


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """One layer or block. before, after: mean squared error of its output, rounded to nearest and as learned.

    kept: False if learning did not lower the error on the samples, and rounding to nearest was restored.
    spilled: bytes of samples that did not fit into memory.
    """

    name: str
    sites: Names
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
    refusals: Refusals = ()


# Steps between two reports of progress; reading the loss waits for the device.
_EVERY = 100


def learn_unit(
    unit: Unit,
    cache: UnitCache,
    settings: Settings,
    qdrop: float,
    place: tuple[int, int],
    progress: Report | None,
) -> UnitResult:
    """Learn the unit's roundings from the cached samples; every weight quantizer that is on must be an AdaRound.

    Adam on v, and on the scales that the unit owns if their rate is not 0. Loss: squared error of the output
    relative to that of rounding to nearest, plus the regularizer. If the error on all samples is not lower in the end,
    rounding to nearest and the old scales are restored. place: index of the unit, and the number of all. progress: told
    every 100 steps.
    """
    roundings = unit.weights
    # Of activations to learn here: the quantizer's learned slots, or a uniform one's scale.
    moving = []
    for quantizer in unit.owned if settings.activation_lr else ():
        ready = quantizer.active and quantizer.calibrated and not quantizer.frozen
        if ready and not quantizer.role.is_weight:
            usual = ["scale"] if isinstance(quantizer, Uniform) else []
            slots = sorted(quantizer.learned) or usual
            moving += [(quantizer, getattr(quantizer, slot)) for slot in slots]
    start = [scale.detach().clone() for _, scale in moving]
    for rounding in roundings:
        rounding.forget_rounding()
    before = _measure_error(unit, cache)
    if not before:  # nothing to gain, and the loss divides by it
        return _make_result(unit, cache, before, before)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_require_gradients_of(unit.module, [scale for _, scale in moving]))
        _start_roundings(unit, cache)
        _optimize_unit(unit, cache, settings, moving, qdrop, before, place, progress)
    for rounding in roundings:
        rounding.stop_learning()
    after = _measure_error(unit, cache)
    if not after < before:  # true for NaN, too
        for rounding in roundings:
            rounding.forget_rounding()
        for (_, scale), value in zip(moving, start, strict=True):
            scale.data.copy_(value)
    return _make_result(unit, cache, before, after)


def _make_result(unit: Unit, cache: UnitCache, before: float, after: float) -> UnitResult:
    # NaN is no improvement.
    improved = after < before
    return UnitResult(
        name=unit.name,
        sites=tuple(quantizer.site for quantizer in unit.weights),
        before=before,
        after=after if improved else before,
        kept=improved,
        samples=cache.count,
        spilled=cache.spilled,
    )


@contextmanager
def _require_gradients_of(module: nn.Module, scales: list[Tensor]) -> Iterator[None]:
    """Run a block in which these scales require gradients and no parameter of the module does."""
    # Scales of uniform quantizers are buffers, so they are listed apart from the parameters.
    before = [(tensor, tensor.requires_grad) for tensor in (*module.parameters(), *scales)]
    for tensor, _ in before:
        tensor.requires_grad_(False)
    for scale in scales:
        scale.requires_grad_(True)
    try:
        yield
    finally:
        for tensor, needed in before:
            tensor.requires_grad_(needed)
            tensor.grad = None


def _start_roundings(unit: Unit, cache: UnitCache) -> None:
    """Start every rounding with its float weight, caught in one run of the unit."""
    # A weight may be a Parameter, or computed from some in the graph: only the call shows it.

    def begin(rounding: nn.Module, inputs: Values) -> None:
        if isinstance(rounding, AdaRound) and rounding.v is None:
            rounding.start_learning(inputs[0])

    with ExitStack() as stack:
        for rounding in unit.weights:
            stack.enter_context(rounding.register_forward_pre_hook(begin))
        stack.enter_context(torch.no_grad())
        unit.run(*cache.draw_samples(1, torch.Generator(), cache.can_mix()).inputs)


def _optimize_unit(
    unit: Unit,
    cache: UnitCache,
    settings: Settings,
    moving: list[tuple[Quantizer, Tensor]],
    qdrop: float,
    nearest: float,
    place: tuple[int, int],
    progress: Report | None,
) -> None:
    # Each unit has random numbers of its own, which do not depend on the units before it. drops draws on the device:
    # one number per element of an activation.
    seed = settings.seed ^ crc32(unit.name.encode())
    picks = torch.Generator().manual_seed(seed)
    drops = torch.Generator(cache.device).manual_seed(seed)
    roundings = unit.weights
    # Roundings have a rate of their own that stays; that of scales falls.
    optimizers = [torch.optim.Adam([rounding.v for rounding in roundings], lr=settings.lr)]
    if moving:
        optimizers.append(
            torch.optim.Adam([scale for _, scale in moving], lr=settings.activation_lr)
        )
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=settings.iterations)
        for optimizer in optimizers[1:]
    ]
    mixed = cache.can_mix()
    # The settings' factor counts for the mean over roundings, the regularizer is a sum.
    factor = settings.regularization / sum(rounding.v.numel() for rounding in roundings)
    with _drop_activations(unit.module, qdrop, drops):
        for step in range(settings.iterations):
            drawn = cache.draw_samples(settings.batch, picks, mixed)
            error = (unit.run(*_drop_inputs(drawn, qdrop, drops)) - drawn.target).square().mean()
            loss = error / nearest
            beta = settings.beta_at(step)
            if beta is not None:
                loss = loss + factor * sum(rounding.regularizer(beta) for rounding in roundings)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for stepper in (*optimizers, *schedules):
                stepper.step()
            for quantizer, _ in moving:
                quantizer.keep_legal()
            last = step == settings.iterations - 1
            if progress is not None and (step % _EVERY == 0 or last):
                state = (step + 1, settings.iterations, float(error.detach()))
                progress(LearningProgress(unit.name, *place, *state))


def _measure_error(unit: Unit, cache: UnitCache) -> float:
    """Mean squared error of the unit's output over all samples."""
    total = 0.0
    count = 0
    with torch.no_grad():
        for record in cache.iterate_records():
            total += float((unit.run(*record.inputs) - record.target).double().square().sum())
            count += record.target.numel()
    return total / count


def _drop_inputs(drawn: Record, qdrop: float, drops: torch.Generator) -> Values:
    """The unit's inputs, each element from the float model with probability qdrop."""
    if not qdrop:
        return drawn.inputs
    values = list(drawn.inputs)
    for k, (value, plain) in enumerate(zip(drawn.inputs, drawn.floats, strict=True)):
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == plain.shape:
            values[k] = _drop_elements(value, plain, qdrop, drops)
    return tuple(values)


def _drop_elements(
    quantized: Tensor, plain: Tensor, qdrop: float, drops: torch.Generator
) -> Tensor:
    chance = torch.rand(plain.shape, generator=drops, device=plain.device)
    return torch.where(chance < qdrop, plain, quantized)


def _drop_activations(module: nn.Module, qdrop: float, drops: torch.Generator) -> ExitStack:
    """A block with QDrop (Wei et al. 2022): elements of activations skip quantization with probability qdrop."""

    def drop(_: nn.Module, inputs: Values, output: Tensor) -> Tensor:
        return _drop_elements(output, inputs[0], qdrop, drops)

    hooks = ExitStack()
    for quantizer in quantizers_of(module) if qdrop else ():
        if not quantizer.role.is_weight:
            hooks.enter_context(quantizer.register_forward_hook(drop))
    return hooks
