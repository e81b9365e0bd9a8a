"""One step of training: the optimizer's parameter groups, a schedule of quantizers and batch norms, a float teacher."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from onnxq.errors import CalibrationError, ConfigError
from torch_frontend.quantizers import PostStep, quantizers_of


def parameter_groups(
    module: nn.Module, *, lr: float, qparam_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameters in up to three groups for any torch optimizer, each parameter once.

    Weights of two or more axes with `weight_decay`; biases and norms without; the quantizers' scales, offsets and
    clipping levels without and at `qparam_lr` (None: lr / 10).
    Raises CalibrationError if a quantizer that learns is not calibrated: its parameters do not exist yet and would
    never be trained. Raises ConfigError for rates below 0.
    """
    if lr <= 0 or (qparam_lr is not None and qparam_lr < 0) or weight_decay < 0:
        raise ConfigError(
            "parameter_groups",
            f"lr={lr}, qparam_lr={qparam_lr}, weight_decay={weight_decay}",
            "lr must be above 0, the others not below",
            code="Q318",
        )
    learned: dict[nn.Parameter, None] = {}
    for quantizer in quantizers_of(module):
        if quantizer.learned and quantizer.active and not quantizer.calibrated:
            raise CalibrationError(
                quantizer.site,
                "has no qparams to learn yet",
                "calibrate before making the optimizer",
                code="Q508",
            )
        learned |= dict.fromkeys(quantizer.parameters(recurse=False))
    # Tied parameters are listed once by module.parameters().
    rest = [p for p in module.parameters() if p not in learned and p.requires_grad]
    groups = (
        ("weights", [p for p in rest if p.ndim > 1], lr, weight_decay),
        ("biases and norms", [p for p in rest if p.ndim <= 1], lr, 0.0),
        # Scales are far below 1, and so must be their steps.
        ("qparams", list(learned), lr / 10 if qparam_lr is None else qparam_lr, 0.0),
    )
    return [
        {"name": n, "params": p, "lr": rate, "weight_decay": decay}
        for n, p, rate, decay in groups
        if p
    ]


def freeze_batch_norms(module: nn.Module) -> int:
    """Put every batch norm in evaluation mode and stop its weight and bias; return their number.

    `module.train()` undoes the mode, so call this after it each time, as a Pacer does. Krishnamoorthi 2018
    (arXiv 1806.08342, §3.2) freezes them towards the end, when the moving averages have settled.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    for norm in norms:
        norm.eval()  # running means and variances no longer move
        for parameter in norm.parameters(recurse=False):
            parameter.requires_grad_(False)
    return len(norms)


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
            if step is not None and (type(step) is not int or step < 0):
                raise ConfigError(
                    f"Schedule.{name}",
                    f"{step!r} is no step",
                    "give a number of steps, or None",
                    code="Q318",
                )


class Pacer:
    """Carries out a Schedule: call `step()` before each training step, after `model.train()`.

    In Lightning call it from `on_train_batch_start`; with Accelerate, in the loop. `attach` keeps learned values legal
    after each step of the optimizer and reports NaN by site.
    """

    def __init__(self, module: nn.Module, schedule: Schedule | None = None) -> None:
        self.module = module
        self.schedule = schedule or Schedule()
        self.steps = 0

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Run a PostStep after each step of the optimizer; the handle removes it."""
        return PostStep(self.module).attach(optimizer)

    def step(self) -> None:
        """Apply the schedule to the module for the step that begins, and count the step."""
        # Every quantizer at every step, since a loaded state or the user may have moved a switch.
        for quantizer in quantizers_of(self.module):
            wanted = self._has_begun("weights" if quantizer.role.is_weight else "activations")
            if quantizer.enabled != wanted:
                quantizer.enabled = wanted
            # Never unfrozen here: the user may have frozen some by hand.
            if self._has_begun("freeze_scales") and not quantizer.frozen:
                quantizer.freeze()
        # Again at every step: model.train() undoes it.
        if self._has_begun("freeze_batch_norms"):
            freeze_batch_norms(self.module)
        self.steps += 1

    def _has_begun(self, name: str) -> bool:
        since = getattr(self.schedule, name)
        return since is not None and self.steps >= since

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, to resume after an interruption."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.steps = int(state["steps"])


class Distiller:
    """The loss of a student, mixed with the divergence of its answers from the teacher's.

        loss = (1 - alpha) task + alpha T**2 KL(softmax(teacher / T) || softmax(student / T))

    teacher: the float model; copied in evaluation mode, so that it may be quantized afterwards. The copy is no
    submodule of the student and is in no state dict. temperature: T, above 0. alpha: the teacher's share, 0 to 1.
    """

    def __init__(self, teacher: nn.Module, *, temperature: float = 4.0, alpha: float = 0.5) -> None:
        if temperature <= 0 or not 0 <= alpha <= 1:
            raise ConfigError(
                "Distiller",
                f"temperature={temperature}, alpha={alpha}",
                "temperature must be above 0, alpha between 0 and 1",
                code="Q318",
            )
        # A copy: QuantModel(copy=False) trains the Parameters of the module it is given.
        self.teacher = copy.deepcopy(teacher).eval().requires_grad_(False)
        self.temperature = temperature
        self.alpha = alpha

    def to(self, *where: Any, **how: Any) -> Distiller:
        """Move the teacher; arguments as for nn.Module.to."""
        self.teacher.to(*where, **how)
        return self

    @torch.no_grad()
    def answers(self, *inputs: Any) -> Tensor:
        """The teacher's logits [N, ..., classes]."""
        return self.teacher(*inputs)

    def loss(self, student: Tensor, teacher: Tensor, task: Tensor) -> Tensor:
        """The mixed loss. student, teacher: logits of one shape, classes last. task: the student's own loss."""
        # float32, whatever autocast does to the logits. T**2: gradients scale as 1 / T**2 (the paper, §2).
        t = self.temperature
        answer, target = (
            F.log_softmax(part.float().flatten(0, -2) / t, dim=-1) for part in (student, teacher)
        )
        divergence = F.kl_div(answer, target, reduction="batchmean", log_target=True) * t**2
        return (1 - self.alpha) * task + self.alpha * divergence
