"""What a training loop owes its quantizers: numbers kept legal after each step, NaN reported, penalties in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onnxq.errors import CalibrationError
from torch_frontend.quantizers.base import Quantizer


def quantizers_of(module: nn.Module) -> list[Quantizer]:
    """All quantizers inside, each once, in module order."""
    return [found for found in module.modules() if isinstance(found, Quantizer)]


def penalty(module: nn.Module) -> Tensor | None:
    """Sum of what the quantizers ask to be added to the loss; None if none does."""
    terms = [term for found in quantizers_of(module) if (term := found.penalty()) is not None]
    return torch.stack([term.reshape(()) for term in terms]).sum() if terms else None


class PostStep:
    """Call after every optimizer step, or `attach` it to the optimizer.

    Scales stay above their floor and zero points among their levels, in place and on the device. NaN and infinities
    raise CalibrationError naming the site: at once on the CPU; on another device the finding travels in the
    background and is looked at `every` steps later, so no step waits for it. `check` waits and looks.
    """

    def __init__(self, module: nn.Module, *, every: int = 16) -> None:
        self.quantizers = quantizers_of(module)
        self.every = every
        self._steps = 0
        self._pending: tuple[list[str], Tensor, Any] | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Run after each of the optimizer's steps."""
        return optimizer.register_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        """Keep all numbers legal; look for NaN where that costs no wait."""
        for found in self.quantizers:
            found.keep_legal()
        self._steps += 1
        on_host = all(held.device.type == "cpu" for _, held in self._learned())
        if on_host:
            self.check()
        elif self._steps % self.every == 0:
            if self._pending is not None and self._pending[2].query():
                self._report(*self._pending[:2])
            self._pending = self._sent()

    def check(self) -> None:
        """Look now. Raises CalibrationError naming the first site whose numbers are not finite."""
        names, flags = self._flags()
        if flags is not None:
            self._report(names, flags.cpu())

    def _learned(self) -> list[tuple[str, Tensor]]:
        return [
            (found.site, held)
            for found in self.quantizers
            for slot in sorted(found.learned)
            if (held := getattr(found, slot)) is not None
        ]

    def _flags(self) -> tuple[list[str], Tensor | None]:
        learned = self._learned()
        if not learned:
            return [], None
        flags = [held.detach().isfinite().all() for _, held in learned]
        return [name for name, _ in learned], torch.stack([flag.to(flags[0].device) for flag in flags])

    def _sent(self) -> tuple[list[str], Tensor, Any] | None:
        names, flags = self._flags()
        if flags is None:
            return None
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(flags.device))
        return names, host, arrived

    def _report(self, names: list[str], flags: Tensor) -> None:
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
