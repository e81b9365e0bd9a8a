"""First numbers from a few batches, and numbers that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onnxq.errors import CalibrationError, OnnxqError
from onnxq.sites import Role
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import Quantizer, quantizers_of


@contextmanager
def observing(module: nn.Module) -> Iterator[None]:
    """Inside, quantizers without numbers observe what passes, and nothing is rounded; leaving it, they have numbers.

    A QuantModel is calibrated, all of it, by its own steps; go on with its `init_qat()`.

    Batch norms keep their averages if the module is in evaluation mode. Under torch.distributed every rank runs its
    own batches, and all ranks leave with the same numbers, those of all batches together. Raises CalibrationError
    naming the first site that no batch reached.
    """
    if isinstance(module, QuantModel):
        module.prepare_calibration(keep_inputs=False)
        with torch.no_grad():
            yield
        _merge(module.quantizers.values())
        module.calc_qparams()
        return
    everything = quantizers_of(module)
    asked = [found for found in everything if found.active and not found.calibrated]
    before = [found.enabled for found in everything]
    for found in everything:
        found.enabled = False
    for found in asked:
        found.observing = True
    try:
        with torch.no_grad():
            yield
    finally:
        for found, enabled in zip(everything, before, strict=True):
            found.enabled = enabled
        for found in asked:
            found.observing = False
    _merge(asked)
    for found in asked:
        found.calc_qparams()


def _merge(asked: Iterable[Quantizer]) -> None:
    """What all ranks have seen, on each; weights are the same everywhere."""
    if dist.is_available() and dist.is_initialized():
        for found in asked:
            if found.role is not Role.WEIGHT and found.disabled_reason is None:
                found.merge_observations(_from_all(found))


def _from_all(found: Quantizer) -> list[Any]:
    """What every rank has seen of this site, in the order of ranks."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, found.observations())
    return seen


def share_numbers(module: nn.Module, *, source: int = 0) -> None:
    """Give every rank the numbers that `source` has: after loading a state on one rank only.

    Raises CalibrationError on every rank, naming the site, if the ranks do not hold the same quantizers.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = {found.site: found for found in quantizers_of(module)}
    told: list[object] = [_said(mine) if dist.get_rank() == source else None]
    dist.broadcast_object_list(told, src=source)
    numbers = told[0]
    if not isinstance(numbers, dict) or set(numbers) != set(mine):
        other = sorted(set(mine) ^ set(numbers if isinstance(numbers, dict) else ()))
        raise CalibrationError(other[0], f"is not on this rank and on rank {source} alike", "build one model on all")
    for site, found in mine.items():
        if numbers[site] is not None:
            found.load_qparams(numbers[site])


def _said(mine: dict[str, Quantizer]) -> dict[str, object]:
    out: dict[str, object] = {}
    for site, found in mine.items():
        try:
            out[site] = found.qparams() if found.calibrated else None
        except OnnxqError as error:
            raise CalibrationError(site, error.cause, error.fix, code=error.code) from error
    return out
