"""Making quantizers ready to leave their markers: numbers fixed, weights baked, everything as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onnxq.errors import ModelError, PlanError
from onnxq.sites import Role
from torch_frontend.quantizers import Quantizer, quantizers_of
from torch_frontend.tracing import evaluating


def active_quantizers(model: nn.Module) -> list[Quantizer]:
    """The quantizers that are on.

    Raises CalibrationError naming one that has no numbers, PlanError when none is on, ModelError when two have one
    site.
    """
    found = [quantizer for quantizer in quantizers_of(model) if quantizer.active]
    if not found:
        raise PlanError(
            type(model).__name__,
            "none of its quantizers is switched on",
            "call freeze(), or set_quant() on a QuantModel",
            code="Q409",
        )
    seen: set[str] = set()
    for quantizer in found:
        quantizer.qparams()
        if quantizer.site in seen:
            raise ModelError(
                quantizer.site, "two quantizers have this site", "give every quantizer a site of its own", code="Q120"
            )
        seen.add(quantizer.site)
    return found


@contextmanager
def marking(
    model: nn.Module, quantizers: Sequence[Quantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Eval mode, frozen numbers and baked weights for the time of an export.

    Weights that their quantizer changes besides rounding them (DoReFa, AdaRound) are caught in one run of the model.
    """
    with evaluating(model):
        baked = _baked(model, quantizers, args, kwargs)
        try:
            for quantizer in quantizers:
                quantizer.prepare_marker(baked.get(quantizer.site))
            yield
        finally:
            for quantizer in quantizers:
                quantizer.forget_marker()


def _baked(
    model: nn.Module, quantizers: Sequence[Quantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def catch(quantizer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(quantizer, Quantizer)
        made = quantizer.bake(inputs[0]).detach().clone()
        if not torch.equal(found.setdefault(quantizer.site, made), made):
            raise ModelError(
                quantizer.site,
                "quantizes two weights, which it changes differently",
                "give each a quantizer of its own",
                code="Q120",
            )

    changing = [q for q in quantizers if q.role is Role.WEIGHT and type(q).bake is not Quantizer.bake]
    hooks = [quantizer.register_forward_pre_hook(catch) for quantizer in changing]
    try:
        if hooks:
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found
