"""From batches to numbers: observers watch the user's own forward passes; `asym` then walks them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from onnxq.errors import CalibrationError, OnnxqError
from onnxq.sites import Role
from torch_frontend.quant_model.follower import Follower
from torch_frontend.quantizers import Quantizer


def start(quantizers: Mapping[str, Quantizer]) -> None:
    """Activations observe and do not quantize; weights are looked at when numbers are made."""
    for quantizer in quantizers.values():
        quantizer.observing = quantizer.role is not Role.WEIGHT and quantizer.disabled_reason is None
        quantizer.enabled = False


def stop(quantizers: Mapping[str, Quantizer]) -> None:
    """Nothing observes any more."""
    for quantizer in quantizers.values():
        quantizer.observing = False


def weights(quantizers: Iterable[Quantizer], tensors: Mapping[str, Tensor]) -> None:
    """Numbers of all weights. tensors: site -> weight."""
    with torch.no_grad():
        for quantizer in quantizers:
            quantizer.observe(tensors[quantizer.site])
            quantizer.calc_qparams()


def activations(quantizers: Iterable[Quantizer]) -> None:
    """Numbers of all activations. Raises CalibrationError that lists the sites nothing reached."""
    missing = []
    for quantizer in quantizers:
        if isinstance(quantizer, Follower) or quantizer.disabled_reason is not None:
            continue
        try:
            quantizer.calc_qparams()
        except CalibrationError as error:
            if "saw no value" not in error.cause:
                raise
            missing.append(quantizer.site)
    if missing:
        shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        raise CalibrationError(
            shown, "no batch reached it", "run batches between prepare_calibration() and calc_qparams()"
        )


def check_numbers(quantizers: Mapping[str, Quantizer]) -> None:
    """Raise CalibrationError naming every active site without usable numbers: none, NaN, inf, no scale above 0."""
    wrong: list[OnnxqError] = []
    for quantizer in quantizers.values():
        if quantizer.active:
            try:
                quantizer.qparams()
            except OnnxqError as error:
                wrong.append(error)
    if wrong:
        more = f" (and {len(wrong) - 1} more: {', '.join(e.subject for e in wrong[1:4])})" if len(wrong) > 1 else ""
        raise CalibrationError(wrong[0].subject, wrong[0].cause + more, wrong[0].fix)


def tensors_of(model: nn.Module, paths: Mapping[str, str]) -> dict[str, Tensor]:
    """Site -> weight, for the quantizers that are children of layers."""
    found = {}
    for site, path in paths.items():
        owner = model.get_submodule(path.rpartition(".")[0])
        if path.endswith(".weight_quantizer") and isinstance(owner._parameters.get("weight"), Tensor):
            found[site] = owner._parameters["weight"]
    return {site: tensor for site, tensor in found.items() if tensor is not None}
