"""Prepare quantizers to leave their markers during an export: qparams fixed, weights baked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onnxq.errors import ModelError, PlanError
from onnxq.sites import Role
from torch_frontend.quantizers import Dynamic, Quantizer, quantizers_of
from torch_frontend.tracing.values import use_eval_mode


def active_quantizers(model: nn.Module) -> list[Quantizer]:
    """The quantizers that are on and leave a marker.

    Raises CalibrationError naming one without qparams, PlanError if none is on, ModelError if two have one site.
    """
    found = [quantizer for quantizer in quantizers_of(model) if quantizer.active and quantizer.marks]
    if not found:
        raise PlanError(
            type(model).__name__,
            "none of its quantizers is switched on",
            "call freeze(), or set_quant() on a QuantModel",
            code="Q409",
        )
    seen: set[str] = set()
    # Markers are found by site alone.
    for quantizer in found:
        if not isinstance(quantizer, Dynamic):
            quantizer.qparams()
        if quantizer.site in seen:
            raise ModelError(
                quantizer.site, "two quantizers have this site", "give every quantizer a site of its own", code="Q120"
            )
        seen.add(quantizer.site)
    return found


@contextmanager
def prepare_markers(
    model: nn.Module, quantizers: Sequence[Quantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Run a block, an export, in eval mode with fixed qparams and baked weights.

    Weights that their quantizer does more with than round to nearest (DoReFa, AdaRound) are caught in one run of the
    model.
    """
    with use_eval_mode(model):
        baked = _bake_weights(model, quantizers, args, kwargs)
        try:
            for quantizer in quantizers:
                quantizer.prepare_marker(baked.get(quantizer.site))
            yield
        finally:
            for quantizer in quantizers:
                quantizer.forget_marker()


def _bake_weights(
    model: nn.Module, quantizers: Sequence[Quantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Site -> baked weight, of quantizers that bake."""
    found: dict[str, Tensor] = {}

    def catch(quantizer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(quantizer, Quantizer)
        made = quantizer.bake(inputs[0]).detach().clone()
        # The marker of a site holds one weight.
        if not torch.equal(found.setdefault(quantizer.site, made), made):
            raise ModelError(
                quantizer.site,
                "quantizes two weights, which it changes differently",
                "give each a quantizer of its own",
                code="Q120",
            )

    # A weight may be computed in forward, so only a run shows it.
    changing = [q for q in quantizers if q.role is Role.WEIGHT and type(q).bake is not Quantizer.bake]
    hooks = [quantizer.register_forward_pre_hook(catch) for quantizer in changing]
    try:
        if hooks:
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found
