"""First qparams from a few batches, and the same qparams on every rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from onnxq.errors import CalibrationError
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import Quantizer, override_switches, quantizers_of


@contextmanager
def observing(module: nn.Module) -> Iterator[None]:
    """Run a block in which quantizers without qparams observe and nothing is quantized; at its end they have qparams.

    A QuantModel is calibrated as a whole by its own steps; continue with its `init_qat()`.

    Batch norms keep their averages if the module is in evaluation mode. Under torch.distributed every rank runs its
    own batches, and all ranks get the same qparams, those of all batches together. Raises CalibrationError naming the
    first site that no batch reached.
    """
    if isinstance(module, QuantModel):
        module.prepare_calibration(keep_inputs=False)  # only `asym` needs the batches again
        with torch.no_grad():
            yield
        _merge_ranks(module.quantizers.values())
        module.calc_qparams()
        return
    quantizers = quantizers_of(module)
    waiting = [
        quantizer for quantizer in quantizers if quantizer.active and not quantizer.calibrated
    ]
    # Others are off, too: first qparams are those of float activations.
    with override_switches(quantizers, False), torch.no_grad():
        for quantizer in waiting:
            quantizer.observing = True
        yield
    _merge_ranks(waiting)
    for quantizer in waiting:
        quantizer.calc_qparams()


def _merge_ranks(waiting: Iterable[Quantizer]) -> None:
    """Give every rank the merged statistics of all ranks."""
    # Weights are the same on every rank.
    if dist.is_available() and dist.is_initialized():
        for quantizer in waiting:
            if not quantizer.role.is_weight and quantizer.disabled_reason is None:
                # Objects, not tensors: observers hold histograms and lists. Every rank comes here for the same sites in
                # order.
                statistics = [None] * dist.get_world_size()
                dist.all_gather_object(statistics, quantizer.observations())
                quantizer.merge_observations(statistics)


def share_qparams(module: nn.Module, *, source: int = 0) -> None:
    """Give every rank the qparams of rank `source`, for instance after loading a state on one rank only.

    Raises CalibrationError on every rank, naming the site, if the ranks do not hold the same quantizers.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    own = {quantizer.site: quantizer for quantizer in quantizers_of(module)}
    sent = [None]
    if dist.get_rank() == source:
        sent = [
            {
                site: quantizer.qparams() if quantizer.slots and quantizer.calibrated else None
                for site, quantizer in own.items()
            }
        ]
    dist.broadcast_object_list(sent, src=source)
    qparams = sent[0] or {}
    # On every rank, so that none of them waits for one that raised.
    if other := sorted(own.keys() ^ qparams):
        raise CalibrationError(
            other[0], f"is not on this rank and on rank {source} alike", "build one model on all"
        )
    for site, quantizer in own.items():
        if qparams[site] is not None:
            quantizer.load_qparams(qparams[site])
