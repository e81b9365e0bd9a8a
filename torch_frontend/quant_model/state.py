"""The states of a QuantModel and the steps allowed in each; any other step is an error that names the next one."""

from __future__ import annotations

from enum import Enum

from onnxq.errors import PlanError


class State(Enum):
    """State of a QuantModel."""

    FLOAT = "float"
    OBSERVING = "observing"
    CALIBRATED = "calibrated"
    QUANTIZED = "quantized"
    FROZEN = "frozen"
    EXPORTED = "exported"


# States with qparams.
_NUMBERS = (State.CALIBRATED, State.QUANTIZED, State.FROZEN, State.EXPORTED)
# step -> the states it may be taken from
STEPS: dict[str, tuple[State, ...]] = {
    "prepare_calibration": (State.FLOAT, State.OBSERVING, State.CALIBRATED, State.QUANTIZED),
    "calc_qparams": (State.OBSERVING,),
    "init_qat": (State.CALIBRATED, State.QUANTIZED),
    "set_quant": _NUMBERS,
    "quantization_error": _NUMBERS,
    "batchnorm_tuning": (State.CALIBRATED, State.QUANTIZED),
    # Freezing twice is harmless.
    "freeze": (State.CALIBRATED, State.QUANTIZED, State.FROZEN, State.EXPORTED),
    "export": _NUMBERS,
}
# The fix of the error, by the state in which a step is refused.
_FIXES = {
    State.FLOAT: "call prepare_calibration(), run some batches, call calc_qparams()",
    State.OBSERVING: "run some batches, then call calc_qparams()",
    State.CALIBRATED: "call prepare_calibration() and run batches to calibrate again",
    State.QUANTIZED: "call prepare_calibration() and run batches to calibrate again",
    State.FROZEN: "frozen qparams stay: load the state from before freeze() to go on",
    State.EXPORTED: "an exported model stays as it is: load the state from before freeze() to go on",
}


def check_step(step: str, state: State) -> None:
    """Raise PlanError if `step` is not allowed in `state`."""
    if state not in STEPS[step]:
        raise PlanError(f"QuantModel.{step}()", f"the model is {state.value}", _FIXES[state], code="Q409")
