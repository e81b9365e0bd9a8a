"""The distillation loss and its teacher."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from onnxq.errors import ConfigError
from torch_frontend import qat


def test_the_distillation_loss_is_the_papers() -> None:
    torch.manual_seed(3)
    student, teacher, task = torch.randn(5, 7), torch.randn(5, 7), torch.tensor(2.0)
    t, alpha = 3.0, 0.25
    p, q = (teacher / t).softmax(-1), (student / t).softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    mixed = qat.Distiller(nn.Identity(), temperature=t, alpha=alpha).loss(student, teacher, task)
    torch.testing.assert_close(mixed, (1 - alpha) * task + alpha * t * t * kl)


def test_the_teacher_is_a_copy_without_gradients() -> None:
    float_net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9))
    distiller = qat.Distiller(float_net)
    x = torch.randn(2, 3)
    want = float_net[0](x)
    with torch.no_grad():
        float_net[0].weight.zero_()
    assert torch.equal(distiller.answers(x), want)
    assert not distiller.answers(x).requires_grad
    with pytest.raises(ConfigError):
        qat.Distiller(float_net, temperature=0)
