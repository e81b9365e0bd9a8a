"""reconstruct(): from a calibrated model and a few samples to learned roundings, unit by unit, first to last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from onnxq.errors import CalibrationError, ConfigError, DataError, PlanError
from onnxq.nearest import did_you_mean
from onnxq.sites import Refusal, Role
from torch_frontend.quant_model import QuantModel, State
from torch_frontend.quantizers import LSQ, AdaRound, LSQPlus, Quantizer, Uniform, quantizers_of
from torch_frontend.reconstruct.blocks import Regions
from torch_frontend.reconstruct.cache import Cache, Record
from torch_frontend.reconstruct.learn import learn
from torch_frontend.reconstruct.settings import METHODS, Progress, Reconstruction, Report, Settings, UnitResult
from torch_frontend.reconstruct.units import Unit, graph_unit, module_unit, quantizing
from torch_frontend.tracing import as_inputs, evaluating

Batch = tuple[tuple[Any, ...], dict[str, Any]]
# Those whose forward is the nearest level of a fixed scale once that scale is learned.
_NEAREST = (Uniform, LSQ, LSQPlus)
_ACTIVATION_LR = {"adaround": 0.0, "brecq": 4e-5}


def reconstruct(
    model: nn.Module,
    data: Iterable[Any],
    method: str = "adaround",
    *,
    qdrop: float = 0.0,
    blocks: Sequence[str] | None = None,
    settings: Settings | None = None,
    progress: Report | None = None,
) -> Reconstruction:
    """Learn how weights are rounded, up or down, so that layers or blocks give what they give in float.

    model: a calibrated QuantModel, or any module with calibrated quantizers inside. It is changed in place: weight
        quantizers become AdaRound with the same scale. Float weights stay as they are. Its state loads into a model
        whose configuration asks for the weight quantizer adaround.
    data: batches as the model takes them (a tensor, a tuple, a mapping); the first `settings.samples` samples count.
    method: "adaround" learns layer by layer with the activations behind it (Nagel et al. 2020); "brecq" block by block,
        activation scales included (Li et al. 2021).
    qdrop: probability with which an element of an activation is left unquantized while learning (Wei et al. 2022; 0.5).
    blocks: names of modules to take as blocks, in place of those found in the graph.

    Each unit reads what the units before it, already learned, give for the data, and aims at what the float model
    gives. Activations take part as they are calibrated. In memory: the samples' inputs, and the inputs and targets of
    one unit up to `settings.cache_bytes`; beyond that a temporary file.
    Raises CalibrationError for weights without a scale, DataError without samples, ConfigError for unknown names.
    """
    settings = settings or Settings()
    if method not in METHODS:
        raise ConfigError(f"method {method!r}", "does not exist", did_you_mean(method, METHODS), code="Q318")
    if not 0 <= qdrop < 1:
        raise ConfigError(
            f"qdrop={qdrop}", "is no probability below 1", "the paper takes 0.5; 0 switches it off", code="Q318"
        )
    if isinstance(model, QuantModel):
        if model.state not in (State.CALIBRATED, State.QUANTIZED):
            cause = f"the model is {model.state.value}"
            raise PlanError("reconstruct()", cause, "calibrate it first; do not freeze it", code="Q409")
        model = model.model
    refusals = _learnable(model)
    batches = _collected(data, settings.samples)
    units = _units(model, method, blocks, settings)
    rate = _ACTIVATION_LR[method] if settings.activation_lr is None else settings.activation_lr
    done: list[UnitResult] = []
    learned: dict[int, str] = {}
    with evaluating(model), quantizing(quantizers_of(model), True):
        for index, unit in enumerate(units):
            own = [found for found in unit.weights if isinstance(found, AdaRound)]
            again = [found for found in own if id(found) in learned]
            refusals += [_shared(found.site, unit.name, learned[id(found)]) for found in again]
            if not own or again:
                continue
            learned.update((id(found), unit.name) for found in own)
            tell = _telling(progress, unit.name, index, len(units), settings.iterations)
            with Cache(settings.cache_bytes) as cache:
                _fill(cache, model, unit, batches, floats=qdrop > 0)
                done.append(learn(unit, cache, settings, qdrop=qdrop, activation_lr=rate, tell=tell))
    return Reconstruction(method=method, units=tuple(done), refusals=tuple(refusals))


def _shared(site: str, unit: str, other: str) -> Refusal:
    return Refusal(site, f"{unit} reads it too; it was learned in {other}", rule="shared", code="R110")


def _telling(
    progress: Report | None, unit: str, index: int, units: int, iterations: int
) -> Callable[[int, float], None]:
    def tell(step: int, loss: float) -> None:
        if progress is not None:
            progress(Progress(unit, index, units, step, iterations, loss))

    return tell


def as_adaround(quantizer: Quantizer) -> AdaRound | None:
    """An AdaRound of the same site, spec and numbers; None where rounding is not to the nearest level.

    Raises CalibrationError for an uncalibrated one.
    """
    if isinstance(quantizer, AdaRound):
        return quantizer
    if type(quantizer) not in _NEAREST:
        return None
    numbers = quantizer.qparams()
    made = AdaRound(
        quantizer.spec, site=quantizer.site, role=quantizer.role, observer=quantizer.observer, target=quantizer.target
    )
    made.to(quantizer.scale.device)
    made.load_qparams(numbers)
    made.bind_sums_of(quantizer)
    made.enabled, made.disabled_reason = quantizer.enabled, quantizer.disabled_reason
    return made.train(quantizer.training)


def _learnable(model: nn.Module) -> list[Refusal]:
    """Put an AdaRound in the place of every weight quantizer that is not disabled; say which cannot be one."""
    made: dict[int, AdaRound | None] = {}
    refusals = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, Quantizer) or child.role is not Role.WEIGHT or child.disabled_reason is not None:
                continue
            if id(child) not in made:
                if not child.calibrated:
                    raise CalibrationError(
                        child.site, "has no scale yet", "calibrate before reconstructing", code="Q508"
                    )
                made[id(child)] = as_adaround(child)
                if made[id(child)] is None:
                    why = f"{child.name} does not round to the nearest level"
                    refusals.append(
                        Refusal(child.site, why, "use uniform, lsq or lsq+ for its weight", "rounding", "R110")
                    )
            if (learnable := made[id(child)]) is not None:
                setattr(parent, name, learnable)
    if not any(isinstance(found, AdaRound) for found in quantizers_of(model)):
        raise CalibrationError("reconstruction", "no weight has a quantizer that can learn to round", "quantize one")
    return refusals


def _collected(data: Iterable[Any], samples: int) -> list[Batch]:
    """The first samples' arguments; the last batch is cut."""
    batches: list[Batch] = []
    for batch in data:
        args, kwargs = as_inputs(batch)
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()]
        size = len(tensors[0]) if tensors else 0
        if size > samples:
            args = tuple(_cut(value, size, samples) for value in args)
            kwargs = {key: _cut(value, size, samples) for key, value in kwargs.items()}
        if size:
            batches.append((args, kwargs))
            samples -= size
        if samples <= 0:
            break
    if not batches:
        raise DataError("reconstruction", "the data has no samples", "give batches of the model's inputs", code="Q203")
    return batches


def _cut(value: Any, size: int, samples: int) -> Any:
    return value[:samples] if isinstance(value, Tensor) and value.dim() and len(value) == size else value


def _units(model: nn.Module, method: str, blocks: Sequence[str] | None, settings: Settings) -> list[Unit]:
    if isinstance(model, fx.GraphModule):
        regions = Regions(model)
        if blocks is not None:
            found = regions.called(blocks)
        else:
            found = regions.layers() if method == "adaround" else regions.blocks(settings.max_layers)
        return [graph_unit(model, region.name, list(region.nodes), region.exit) for region in found]
    if blocks is None and method == "brecq":
        raise ConfigError(
            "method 'brecq'",
            f"{type(model).__name__} has no graph to find blocks in",
            "name them: blocks=[…]",
            code="Q304",
        )
    if blocks is None:
        blocks = [
            name for name, module in model.named_modules()
            if not isinstance(module, Quantizer)
            and any(isinstance(c, Quantizer) and c.role is Role.WEIGHT for c in module.children())
        ]  # fmt: skip
    return [module_unit(model, name) for name in blocks]


def _fill(cache: Cache, model: nn.Module, unit: Unit, batches: list[Batch], *, floats: bool) -> None:
    """Run all batches twice: in float for targets, quantized for inputs."""
    every = quantizers_of(model)
    for args, kwargs in batches:
        with quantizing(every, False):
            plain = unit.catch(args, kwargs)
        for (inputs, _), (unquantized, target) in zip(unit.catch(args, kwargs), plain, strict=True):
            cache.add(Record(inputs, unquantized if floats else (), target))
    if not cache.records:
        raise DataError(unit.name, "no batch of the data reaches it", "give data that does, or name other blocks")
