"""The states of a QuantModel, the steps allowed in each, and the switches of its quantizers."""

from enum import Enum

from onnxq.config import matches_any, suggest_names
from onnxq.errors import ConfigError, PlanError
from torch_frontend.quantizers import DisabledBy, Quantizer
from torch_frontend.quantizers.base import Quantizers


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
STEPS = {
    "prepare_calibration": (State.FLOAT, State.OBSERVING, State.CALIBRATED, State.QUANTIZED),
    "calc_qparams": (State.OBSERVING,),
    "init_qat": (State.CALIBRATED, State.QUANTIZED),
    "set_quant": _NUMBERS,
    "quantization_error": _NUMBERS,
    "batchnorm_tuning": (State.CALIBRATED, State.QUANTIZED),
    # Freezing twice is harmless.
    "freeze": _NUMBERS,
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
        raise PlanError(
            f"QuantModel.{step}()", f"the model is {state.value}", _FIXES[state], code="Q409"
        )


def switch_kinds(quantizers: Quantizers, weights: bool, activations: bool) -> None:
    """Set the switches of all weights and of all activations."""
    for quantizer in quantizers.values():
        quantizer.enabled = weights if quantizer.role.is_weight else activations


def find_matching(quantizers: Quantizers, pattern: str) -> list[Quantizer]:
    """Quantizers whose sites match a name, a glob or a /regular expression/. Raises ConfigError if there are none."""
    matching = [quantizer for site, quantizer in quantizers.items() if matches_any(pattern, site)]
    if not pattern or not matching:
        raise ConfigError(
            f"pattern {pattern!r}",
            "matches no site",
            suggest_names(pattern, quantizers),
            code="Q309",
        )
    return matching


def disable_sites(quantizers: Quantizers, pattern: str, reason: str) -> list[Quantizer]:
    """Switch the matching sites off for good; return all of them."""
    matching = find_matching(quantizers, pattern)
    for quantizer in matching:
        # An earlier decision keeps its reason: undoing the user's own must not undo a pass's.
        if quantizer.disabled_reason is None:
            quantizer.disabled_reason = f"by hand: {reason}" if reason else "by hand"
            quantizer.disabled_by = DisabledBy.USER
    return matching


def enable_sites(quantizers: Quantizers, pattern: str, *, force: bool) -> list[Quantizer]:
    """Undo `disable_sites` for the matching sites; return those that may quantize again.

    force: undo decisions of passes, too. Raises PlanError if passes decided on all matching sites and force is False.
    """
    matching = find_matching(quantizers, pattern)
    # Sites that nobody disabled are fine, too: a pattern may match more than it undoes.
    mine = [
        q
        for q in matching
        if q.disabled_reason is None or force or q.disabled_by is DisabledBy.USER
    ]
    if not mine:
        first = matching[0]
        raise PlanError(
            first.site,
            f"a pass switched it off: {first.disabled_reason}",
            "pass force=True to overrule it",
            code="Q409",
        )
    for quantizer in mine:
        quantizer.disabled_reason = None
        quantizer.disabled_by = DisabledBy.PASS
    return mine
