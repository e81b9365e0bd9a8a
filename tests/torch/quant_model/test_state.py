"""The states of a QuantModel: steps in order, and errors for any other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import PlanError
from tests.torch.nets import images
from tests.torch.quant_model.kit import model
from torch_frontend.quant_model import State


def test_the_states_follow_one_another() -> None:
    made = model()
    assert made.state is State.FLOAT
    assert made.prepare_calibration().state is State.OBSERVING
    made(images())
    assert made.calc_qparams().state is State.CALIBRATED
    assert made.set_quant().state is State.QUANTIZED
    assert made.init_qat().state is State.QUANTIZED
    assert made.training
    assert made.freeze().state is State.FROZEN
    assert not made.training
    made.mark_exported()
    assert made.state is State.EXPORTED


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ((), "calc_qparams"),
        ((), "set_quant"),
        ((), "init_qat"),
        ((), "freeze"),
        ((), "begin_export"),
        (("prepare_calibration",), "set_quant"),
        (("prepare_calibration", "run", "calc_qparams"), "calc_qparams"),
        (("prepare_calibration", "run", "calc_qparams", "freeze"), "prepare_calibration"),
        (("prepare_calibration", "run", "calc_qparams", "freeze"), "init_qat"),
        (("prepare_calibration", "run", "calc_qparams", "freeze", "mark_exported"), "init_qat"),
    ],
)
def test_a_step_out_of_turn_says_what_comes_first(steps: tuple[str, ...], wrong: str) -> None:
    made = model()
    for step in steps:
        made(images()) if step == "run" else getattr(made, step)()
    with pytest.raises(PlanError, match=r"the model is \w+ \[Q409\]\n  fix: "):
        getattr(made, wrong)()
