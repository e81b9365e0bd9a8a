"""Knowledge distillation: the float model teaches the quantized one (Hinton et al. 2015, arXiv 1503.02531)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onnxq.errors import ConfigError


class Distiller:
    """The loss of a student, mixed with the divergence of its answers from the teacher's.

        loss = (1 - alpha) task + alpha T**2 KL(softmax(teacher / T) || softmax(student / T))

    teacher: the float model; copied in evaluation mode, so that it may be quantized afterwards. The copy is no
    submodule of the student and is in no state dict. temperature: T, above 0. alpha: the teacher's share, 0 to 1.
    """

    def __init__(self, teacher: nn.Module, *, temperature: float = 4.0, alpha: float = 0.5) -> None:
        if temperature <= 0 or not 0 <= alpha <= 1:
            raise ConfigError("Distiller", f"temperature={temperature}, alpha={alpha}",
                              "temperature must be above 0, alpha between 0 and 1", code="Q318")  # fmt: skip
        # A copy: QuantModel(copy=False) trains the Parameters of the module it is given.
        self.teacher = copy.deepcopy(teacher).eval().requires_grad_(False)
        self.temperature, self.alpha = temperature, alpha

    def to(self, *where: Any, **how: Any) -> Distiller:
        """Move the teacher; arguments as for nn.Module.to."""
        self.teacher.to(*where, **how)
        return self

    @torch.no_grad()
    def answers(self, *inputs: Any) -> Tensor:
        """The teacher's logits [N, ..., classes]."""
        logits: Tensor = self.teacher(*inputs)
        return logits

    def loss(self, student: Tensor, teacher: Tensor, task: Tensor) -> Tensor:
        """The mixed loss. student, teacher: logits of one shape, classes last. task: the student's own loss."""
        # float32, whatever autocast does to the logits. T**2: gradients scale as 1 / T**2 (the paper, §2).
        t = self.temperature
        answer, target = (F.log_softmax(part.float().flatten(0, -2) / t, dim=-1) for part in (student, teacher))
        divergence = F.kl_div(answer, target, reduction="batchmean", log_target=True) * t**2
        return (1 - self.alpha) * task + self.alpha * divergence
