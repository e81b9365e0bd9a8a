"""Batch norms tuned to the outputs of quantized layers, then folded.

Folding y = f (Wx) + … multiplies each output channel of W by f, and so its scale by |f|: the integers stay the same
(with the opposite sign where f < 0), which takes one scale per channel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onnxq.errors import CauseAndFix, PlanError
from onnxq.numerics import scale_floor
from onnxq.spec import QParams
from torch_frontend.placement.pairs import Decision
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.batch_norms import compute_factors, find_layers, fold_call
from torch_frontend.tracing.modules import find_module
from torch_frontend.tracing.names import list_readers
from torch_frontend.tracing.values import use_eval_mode

# The call of a layer, and of the batch norm behind it.
NormPair = tuple[fx.Node, fx.Node]


def find_pairs(model: nn.Module) -> list[NormPair]:
    """Calls where a batch norm folds into a layer without a change to another result.

    Raises PlanError for a model that was not traced, since its connections are unknown.
    """
    if not isinstance(model, fx.GraphModule):
        raise PlanError(
            "batchnorm_tuning()",
            "the model was not traced",
            "make its forward traceable (see refusals)",
            code="Q410",
        )
    folds = find_layers(model, lambda value: _find_layer_call(model, value))
    return [(layer, norm) for norm, layer, why in folds if why is None]


def _find_layer_call(model: fx.GraphModule, node: Any) -> fx.Node | None:
    """The call that makes a value, seen through quantizers that are off for good; None behind an active one."""
    while (module := find_module(model, node)) is not None and len(list_readers(node)) == 1:
        if not isinstance(module, Quantizer):
            return node
        if module.disabled_reason is None:
            return None
        node = node.args[0]
    return None


def check_tunable(model: nn.Module, pairs: list[NormPair]) -> None:
    """Raise PlanError if there is no batch norm, or a weight that cannot take one factor per channel."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise PlanError(
            "batchnorm_tuning()",
            "the model has no batch norm left",
            "write `torch: {fuse_bn: false}`",
            code="Q410",
        )
    for pair in pairs:
        if (wrong := _explain_scales(model, pair)) is not None:
            raise PlanError(pair[0].target, *wrong, code="Q410")


def _explain_scales(model: nn.Module, pair: NormPair) -> CauseAndFix | None:
    """(cause, fix) where the weight of a pair cannot take one factor per channel, or None."""
    quantizer = model.get_submodule(str(pair[0].target))._modules.get("weight_quantizer")
    if not isinstance(quantizer, Quantizer):
        return None
    if not quantizer.spec.has_channels:
        cause = f"its weight has one scale for all channels, which {pair[1].target} multiplies differently"
        return cause, "write `weights: {granularity: channel}`"
    # A quantizer that bakes (DoReFa, AdaRound) does more than divide by a scale.
    if type(quantizer).bake is not Quantizer.bake:
        return (
            f"{quantizer.name} changes weights in a way that a factor breaks",
            "use uniform, lsq or lsq+",
        )
    return None


def fold_trained(model: nn.Module) -> list[Decision]:
    """Fold the batch norms that were left to train with the statistics of their batches, where the integers stay.

    The trained integers are those of the folded layer, see above: a weight q s in front of a batch norm that multiplies
    by f is the weight q (f s) of the folded one. Jacob et al. 2018 (arXiv 1712.05877, §3.2) fold in each step for it,
    since they have one scale a tensor.
    """
    if not isinstance(model, fx.GraphModule):
        return []
    foldable = []
    decisions = []
    for layer, norm in find_pairs(model):
        fault = _explain_scales(model, (layer, norm))
        if fault is None:
            foldable.append((layer, norm))
        else:
            decisions.append(
                Decision(str(norm.target), f"not folded into {layer.target}: {fault[0]}", "fuse-bn")
            )
    return fold_tuned(model, foldable, "trained", "fuse-bn") + decisions


@contextmanager
def tune_statistics(model: nn.Module) -> Iterator[None]:
    """Run a block in which batch norms average the statistics of its batches; everything else is in eval mode."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    momenta = [norm.momentum for norm in norms]
    with use_eval_mode(model):
        for norm in norms:
            norm.reset_running_stats()  # the float model's statistics must not count
            norm.momentum = None  # for torch: the plain mean over all batches
            norm.train()
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def fold_tuned(
    model: nn.Module, pairs: list[NormPair], how: str = "tuned", rule: str = "batchnorm-tuning"
) -> list[Decision]:
    """Fold batch norms into their layers; scales are multiplied with the weights. how, rule: for the decisions."""
    decisions = []
    for layer, norm in pairs:
        path = str(norm.target)
        factor, _ = compute_factors(model.get_submodule(path))
        quantizer = fold_call(model, norm, layer)._modules.get("weight_quantizer")
        if isinstance(quantizer, Quantizer) and quantizer.calibrated:
            quantizer.load_qparams(_scale_qparams(quantizer, factor.cpu().numpy()))
        decisions.append(Decision(path, f"{how} and folded into {layer.target}", rule))
    model.graph.lint()
    model.recompile()
    for _, norm in pairs:
        model.delete_submodule(str(norm.target))
    return decisions


def _scale_qparams(quantizer: Quantizer, factor: Any) -> QParams:
    qparams = quantizer.qparams()
    spec = quantizer.spec
    # w -> f w keeps the integers up to their sign; an asymmetric range is mirrored by q -> qmin + qmax - q.
    scale = np.maximum(qparams.scale * abs(factor), scale_floor(spec)).astype(np.float32)
    zero = qparams.zero_point
    turned = zero if spec.symmetric else spec.qmin + spec.qmax - zero
    return QParams(
        scale,
        np.where(factor < 0, turned, zero).astype(np.int32),
        f"{qparams.origin}, batch norm folded",
    )
