"""Duties of a training loop towards its quantizers: legal values after each step, NaN checks, penalties in the loss."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onnxq.errors import CalibrationError
from torch_frontend.quantizers.base import Quantizer


def quantizers_of(module: nn.Module) -> list[Quantizer]:
    """All quantizers inside a module, each once, in module order."""
    return [child for child in module.modules() if isinstance(child, Quantizer)]


@contextmanager
def override_switches(quantizers: Iterable[Quantizer], on: bool) -> Iterator[None]:
    """Run a block with these quantizers on or off and not observing; disabled ones stay off."""
    before = [(quantizer, quantizer.enabled, quantizer.observing) for quantizer in quantizers]
    for quantizer, _, _ in before:
        quantizer.enabled = on
        quantizer.observing = False
    try:
        yield
    finally:
        for quantizer, enabled, observing in before:
            quantizer.enabled = enabled
            quantizer.observing = observing


def penalty(module: nn.Module) -> Tensor:
    """Sum of the quantizers' own terms of the loss, such as PACT's L2 penalty of its clipping levels; 0 without any."""
    terms = [
        term for quantizer in quantizers_of(module) if (term := quantizer.penalty()) is not None
    ]
    # A tensor on the model's device, so that loops need no special case.
    anchor = next(module.parameters(), None)
    terms = terms or [torch.zeros((), device=None if anchor is None else anchor.device)]
    # Stacked, so that a GPU runs two kernels however many terms there are.
    return torch.stack([term.reshape(()) for term in terms]).sum()


class PostStep:
    """Keeps learned values legal; call it after every optimizer step, or `attach` it to the optimizer.

    Scales are clamped to their floor and zero points to their range, in place and on the device. NaN and inf raise
    CalibrationError naming the site: at once on the CPU; on another device the result is copied in the background and
    read `every` steps later, so that no step waits for it. `check` waits for it.
    """

    def __init__(self, module: nn.Module, *, every: int = 16) -> None:
        self.quantizers = quantizers_of(module)
        self.every = every
        self._steps = 0
        self._pending: tuple[list[str], Tensor, Any] | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Run after each step of the optimizer; the handle removes it."""
        return optimizer.register_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        """Clamp all learned values; look for NaN where that does not wait for the device."""
        for quantizer in self.quantizers:
            quantizer.keep_legal()
        self._steps += 1
        learned = self._list_learned()
        # On the CPU there is nothing to wait for, so the check is made at every step.
        if all(tensor.device.type == "cpu" for _, tensor in learned):
            self.check()
        elif self._steps % self.every == 0:
            # Not arrived yet: the next round will show the same NaN, since NaN stays.
            if self._pending is not None and self._pending[2].query():
                self._report_faults(*self._pending[:2])
            self._pending = self._send_flags(*_flag_finite(learned))

    def check(self) -> None:
        """Wait for the device. Raises CalibrationError naming the first site with NaN or inf."""
        if learned := self._list_learned():
            names, flags = _flag_finite(learned)
            self._report_faults(names, flags.cpu())

    def _list_learned(self) -> list[tuple[str, Tensor]]:
        """(site, learned slot) of all quantizers."""
        return [
            (quantizer.site, tensor)
            for quantizer in self.quantizers
            for slot in sorted(quantizer.learned)
            if (tensor := getattr(quantizer, slot)) is not None
        ]

    def _send_flags(self, names: list[str], flags: Tensor) -> tuple[list[str], Tensor, Any]:
        """Start to copy the flags to the host: (sites, flags there, event that says they have arrived)."""
        # Only pinned memory is copied without blocking the host.
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(flags.device))
        return names, host, arrived

    def _report_faults(self, names: list[str], flags: Tensor) -> None:
        wrong = [name for name, fine in zip(names, flags.tolist(), strict=True) if not fine]
        if wrong:
            others = f", nor are {len(wrong) - 1} others" if wrong[1:] else ""
            raise CalibrationError(
                wrong[0],
                f"its learned scale is no longer a finite number{others}",
                "lower the learning rate of the quantizers' parameters, or clip gradients; "
                "if the loss was NaN before, look there first",
                code="Q510",
            )


def _flag_finite(learned: list[tuple[str, Tensor]]) -> tuple[list[str], Tensor]:
    """Sites, and a bool tensor on the device: True where the slot is finite."""
    # Of a sharded tensor (DTensor) each rank checks its own part: gathering would make all ranks wait at each step.
    parts = [
        tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
        for _, tensor in learned
    ]
    flags = [part.isfinite().all() for part in parts]
    return [name for name, _ in learned], torch.stack([flag.to(flags[0].device) for flag in flags])
