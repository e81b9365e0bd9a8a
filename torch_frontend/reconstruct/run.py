"""reconstruct(): learn the roundings of a calibrated model from a few samples, unit by unit, first to last."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from onnxq.errors import CalibrationError, ConfigError, DataError, PlanError, suggest_names
from onnxq.sites import Refusal
from torch_frontend.quant_model import QuantModel, State
from torch_frontend.quantizers import AdaRound, Quantizer, Uniform, override_switches, quantizers_of
from torch_frontend.quantizers.learned import LSQ, LSQPlus
from torch_frontend.reconstruct.cache import Record, UnitCache
from torch_frontend.reconstruct.learn import (
    METHODS,
    Reconstruction,
    Report,
    Settings,
    UnitResult,
    learn_unit,
)
from torch_frontend.reconstruct.units import Regions, Unit, graph_unit, module_unit
from torch_frontend.tracing.modules import Inputs, as_inputs, list_batches
from torch_frontend.tracing.values import use_eval_mode

# Quantizers whose forward rounds to nearest with a scale that AdaRound can take over.
_NEAREST = (Uniform, LSQ, LSQPlus)


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
    """Learn which weights are rounded up and which down, so that outputs of layers or blocks stay as in float.

    model: a calibrated QuantModel, or any module with calibrated quantizers inside. It is changed in place: weight
        quantizers become AdaRound with the same scale. Float weights do not change. Its state loads into a model that
        is configured with the weight quantizer adaround.
    data: batches as the model takes them (a tensor, a tuple, a mapping); the first `settings.samples` samples are used.
    method: "adaround" learns layer by layer with the activations behind it (Nagel et al. 2020); "brecq" block by block,
        activation scales included (Li et al. 2021).
    qdrop: probability with which an element of an activation stays float while learning (Wei et al. 2022; 0.5).
    blocks: names of modules to use as blocks, in place of those found in the graph.

    Inputs of a unit come from the units before it, already learned; its target is the float model's value. Activations
    are quantized as calibrated. In memory: the samples' inputs, and the inputs and targets of one unit up to
    `settings.cache_bytes`; the rest is in a temporary file.
    Raises CalibrationError for weights without a scale, DataError without samples, ConfigError for unknown names.
    """
    settings = settings or Settings()
    _check_method(method, qdrop)
    if isinstance(model, QuantModel):
        if model.state not in (State.CALIBRATED, State.QUANTIZED):
            cause = f"the model is {model.state.value}"
            fix = "calibrate it first; do not freeze it"
            raise PlanError("reconstruct()", cause, fix, code="Q409")
        model = model.model
    refusals = _make_learnable(model)
    batches = _collect_batches(data, settings.samples)
    units = _find_units(model, method, blocks, settings)
    # 0 is a choice, None the method's default.
    if settings.activation_lr is None:
        settings = replace(settings, activation_lr=METHODS[method])
    done: list[UnitResult] = []
    learned: dict[AdaRound, str] = {}
    # First to last: a unit's inputs come from units that are learned.
    with use_eval_mode(model), override_switches(quantizers_of(model), True):
        for index, unit in enumerate(units):
            own = unit.weights
            # A weight that two units share has one rounding, learned in the first.
            again = [quantizer for quantizer in own if quantizer in learned]
            for quantizer in again:
                reason = f"{unit.name} reads it too; it was learned in {learned[quantizer]}"
                refusals.append(Refusal(quantizer.site, reason, rule="shared", code="R110"))
            if not own or again:
                continue
            learned |= dict.fromkeys(own, unit.name)
            place = (index, len(units))
            with UnitCache(settings.cache_bytes) as cache:
                _fill_cache(cache, model, unit, batches, floats=qdrop > 0)
                done.append(learn_unit(unit, cache, settings, qdrop, place, progress))
    return Reconstruction(method=method, units=tuple(done), refusals=tuple(refusals))


def _check_method(method: str, qdrop: float) -> None:
    if method not in METHODS:
        raise ConfigError(
            f"method {method!r}", "does not exist", suggest_names(method, METHODS), code="Q318"
        )
    if not 0 <= qdrop < 1:
        raise ConfigError(
            f"qdrop={qdrop}",
            "is no probability below 1",
            "the paper takes 0.5; 0 switches it off",
            code="Q318",
        )


def as_adaround(quantizer: Quantizer) -> AdaRound | None:
    """An AdaRound of the same site, spec and qparams; None for a quantizer that does more than round to nearest.

    Raises CalibrationError for an uncalibrated quantizer.
    """
    if isinstance(quantizer, AdaRound):
        return quantizer
    qparams = quantizer.qparams()
    if type(quantizer) not in _NEAREST:
        return None
    adaround = AdaRound(
        quantizer.spec,
        site=quantizer.site,
        role=quantizer.role,
        observer=quantizer.observer,
        target=quantizer.target,
    )
    adaround.to(quantizer.scale.device)  # before the qparams, which appear on its device
    adaround.load_qparams(qparams)
    adaround.bind_sums_of(quantizer)
    adaround.enabled = quantizer.enabled
    adaround.disabled_reason = quantizer.disabled_reason
    adaround.disabled_by = quantizer.disabled_by
    return adaround.train(quantizer.training)


def _make_learnable(model: nn.Module) -> list[Refusal]:
    """Replace every weight quantizer that is not disabled by an AdaRound; Refusals for those that cannot be one."""
    # One quantizer that several layers share becomes one AdaRound.
    substitutes = {}
    refusals = []
    # A list, since children are replaced on the way.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (
                not isinstance(child, Quantizer)
                or not child.role.is_weight
                or child.disabled_reason is not None
            ):
                continue
            if child not in substitutes:
                substitutes[child] = as_adaround(child)
                if substitutes[child] is None:
                    why = f"{child.name} does not round to nearest"
                    refusals.append(
                        Refusal(
                            child.site,
                            why,
                            "use uniform, lsq or lsq+ for its weight",
                            "rounding",
                            "R110",
                        )
                    )
            if (learnable := substitutes[child]) is not None:
                setattr(parent, name, learnable)
    if not any(isinstance(child, AdaRound) for child in quantizers_of(model)):
        raise CalibrationError(
            "reconstruction", "no weight has a quantizer that can learn to round", "quantize one"
        )
    return refusals


def _collect_batches(data: Iterable[Any], samples: int) -> list[Inputs]:
    """Arguments of the first `samples` samples, batch by batch; the last batch is cut."""
    batches = []
    for batch in list_batches(data):
        inputs = as_inputs(batch)
        tensors = [
            value
            for value in (*inputs.args, *inputs.kwargs.values())
            if isinstance(value, Tensor) and value.dim()
        ]
        size = len(tensors[0]) if tensors else 0
        if size > samples:
            cut = partial(_cut_tensor, size=size, samples=samples)
            inputs = tree_map_only(Tensor, cut, inputs)
        if size:
            batches.append(inputs)
            samples -= size
        if samples <= 0:
            break
    if not batches:
        raise DataError(
            "reconstruction",
            "the data has no samples",
            "give batches of the model's inputs",
            code="Q203",
        )
    return batches


def _cut_tensor(value: Tensor, size: int, samples: int) -> Tensor:
    return value[:samples] if value.dim() and len(value) == size else value


def _find_units(
    model: nn.Module, method: str, blocks: Sequence[str] | None, settings: Settings
) -> list[Unit]:
    if isinstance(model, fx.GraphModule):
        regions = Regions(model)
        if blocks is not None:
            chosen = regions.find_named(blocks)
        else:
            chosen = (
                regions.list_layers()
                if method == "adaround"
                else regions.list_blocks(settings.max_layers)
            )
        return [graph_unit(model, region) for region in chosen]
    if blocks is None and method == "brecq":
        raise ConfigError(
            "method 'brecq'",
            f"{type(model).__name__} has no graph to find blocks in",
            "name them: blocks=[…]",
            code="Q304",
        )
    # Without a graph layers are the modules that hold a weight quantizer.
    if blocks is None:
        blocks = [
            name
            for name, module in model.named_modules()
            if not isinstance(module, Quantizer)
            and any(isinstance(c, Quantizer) and c.role.is_weight for c in module.children())
        ]
    return [module_unit(model, name) for name in blocks]


def _fill_cache(
    cache: UnitCache, model: nn.Module, unit: Unit, batches: list[Inputs], *, floats: bool
) -> None:
    """Fill the cache with a unit's values for all batches, from a float run (targets) and a quantized run (inputs)."""
    every = quantizers_of(model)
    for batch in batches:
        with override_switches(every, False):
            plain = unit.catch(batch)
        # Calls are paired by their order: a unit may be called several times in a batch.
        for (inputs, _), (unquantized, target) in zip(unit.catch(batch), plain, strict=True):
            cache.add_record(Record(inputs, unquantized if floats else (), target))
    if not cache.records:
        raise DataError(
            unit.name,
            "no batch of the data reaches it",
            "give data that does, or name other blocks",
        )
