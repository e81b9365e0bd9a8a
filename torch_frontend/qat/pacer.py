"""Schedule of a training: the steps at which quantizers are switched on, and scales and batch norms frozen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from onnxq.errors import ConfigError
from onnxq.sites import Role
from torch_frontend.qat.batch_norm import freeze_batch_norms
from torch_frontend.quantizers import PostStep, quantizers_of


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Training steps, counted from 0, from which a setting holds; None: never.

    weights, activations: their quantizers are on. freeze_batch_norms: batch norms do not change.
    freeze_scales: scales, offsets and clipping levels are no longer trained.
    """

    weights: int | None = 0
    activations: int | None = 0
    freeze_batch_norms: int | None = None
    freeze_scales: int | None = None

    def __post_init__(self) -> None:
        for name, step in asdict(self).items():
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise ConfigError(
                    f"Schedule.{name}", f"{step!r} is no step", "give a number of steps, or None", code="Q318"
                )


class Pacer:
    """Carries out a Schedule: call `step()` before each training step, after `model.train()`.

    In Lightning call it from `on_train_batch_start`; with Accelerate, in the loop. `attach` keeps learned values legal
    after each step of the optimizer and reports NaN by site.
    """

    def __init__(self, module: nn.Module, schedule: Schedule | None = None) -> None:
        self.module, self.schedule = module, schedule or Schedule()
        self.steps = 0

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Run a PostStep after each step of the optimizer; the handle removes it."""
        return PostStep(self.module).attach(optimizer)

    def step(self) -> None:
        """Apply the schedule to the module for the step that begins, and count the step."""
        # Every quantizer at every step, since a loaded state or the user may have moved a switch.
        for found in quantizers_of(self.module):
            wanted = self._holds("weights" if found.role is Role.WEIGHT else "activations")
            if found.enabled != wanted:
                found.enabled = wanted
            # Never unfrozen here: the user may have frozen some by hand.
            if self._holds("freeze_scales") and not found.frozen:
                found.freeze()
        # Again at every step: model.train() undoes it.
        if self._holds("freeze_batch_norms"):
            freeze_batch_norms(self.module)
        self.steps += 1

    def _holds(self, name: str) -> bool:
        since = getattr(self.schedule, name)
        return since is not None and self.steps >= since

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, to resume after an interruption."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.steps = int(state["steps"])
