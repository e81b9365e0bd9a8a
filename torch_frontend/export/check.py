"""The exported file on the example inputs, compared with the module that it was made from."""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onnxq.arrays import Array
from onnxq.errors import OnnxqError
from onnxq.evaluation.accumulator import measure_error
from onnxq.report.terminal import format_decibel
from onnxq.runtime import Feeds, Session
from torch_frontend.quantizers import override_switches, quantizers_of
from torch_frontend.tracing.modules import Inputs, as_inputs
from torch_frontend.tracing.values import use_eval_mode

Arrays = list[Array]

# dB. Float rounding alone leaves more than this; less is right only where it moved values across a level.
_ROUNDING_DB = 60.0
# dB by which levels that float rounding crosses may exceed the noise of quantization itself.
_MARGIN_DB = 3.0
_log = logging.getLogger("onnxq")


class ExportWarning(UserWarning):
    """The exported file computes something else than the module, beyond rounding."""

    code = "W126"


@dataclass(frozen=True)
class ExportCheck:
    """SQNR of the file's outputs against torch's, in dB, the lowest of all outputs.

    as_written: without ONNX Runtime's optimizations. as_run: with them. max_abs: the largest difference of a value of
    both. quantization: torch's quantized outputs against its float ones, the noise that quantization itself makes.
    not_run: why nothing was compared; "" where it was.
    """

    as_written: float = np.nan
    as_run: float = np.nan
    max_abs: float = np.nan
    quantization: float = np.nan
    not_run: str = ""

    @property
    def beyond_rounding(self) -> bool:
        """True where the file is farther from torch than quantization is from the float model."""
        worst = min(self.as_written, self.as_run)
        return not self.not_run and worst < min(_ROUNDING_DB, self.quantization - _MARGIN_DB)

    def __str__(self) -> str:
        if self.not_run:
            return f"was not compared with torch: {self.not_run}"
        written, run, rounding = map(
            format_decibel, (self.as_written, self.as_run, self.quantization)
        )
        return (
            f"against torch: SQNR {written} as written, {run} as ONNX Runtime optimizes it (at most {self.max_abs:.2g} "
            f"apart); of quantization itself {rounding}"
        )


def check_export(model: nn.Module, file: Path, example_inputs: Any) -> ExportCheck:
    """Run the file on the example inputs, and say how far it is from the module.

    The line goes to the logger `onnxq`; ExportWarning where the difference is beyond rounding.
    """
    outcome = _compare(model, file, as_inputs(example_inputs))
    _log.info("%s %s", file.name, outcome)
    if outcome.beyond_rounding:
        text = f"{file.name} {outcome}: it does not compute what the module does [{ExportWarning.code}]"
        warnings.warn(text, ExportWarning, stacklevel=3)
    return outcome


def _compare(model: nn.Module, file: Path, inputs: Inputs) -> ExportCheck:
    wanted = _run_torch(model, inputs)
    with override_switches(quantizers_of(model), False):
        plain = _run_torch(model, inputs)
    try:
        runs = []
        for optimize in (False, True):
            session = Session(file, optimize=optimize)
            feeds = _name_inputs(session, inputs)
            if feeds is None:
                return ExportCheck(not_run="its inputs are not those of the example")
            runs.append(list(session.run(feeds).values()))
    except OnnxqError as error:
        return ExportCheck(not_run=error.fault)
    if [value.shape for value in runs[0]] != [value.shape for value in wanted]:
        return ExportCheck(not_run="its outputs are not those of the module")
    (written, distance), (optimized, other) = (_measure(wanted, run) for run in runs)
    return ExportCheck(written, optimized, max(distance, other), _measure(plain, wanted)[0])


def _measure(wanted: Arrays, got: Arrays) -> tuple[float, float]:
    """SQNR of the worst output in dB, and the largest difference; floats only."""
    worst = np.inf
    most = 0.0
    for expected, value in zip(wanted, got, strict=True):
        if expected.dtype.kind == "f" and expected.size:
            accuracy = measure_error(expected, value)
            worst = min(worst, accuracy.whole_db)
            most = max(most, accuracy.max_abs)
    return worst, most


def _run_torch(model: nn.Module, inputs: Inputs) -> Arrays:
    with use_eval_mode(model):
        return _list_arrays(inputs.run_model(model))


def _list_arrays(values: Any) -> Arrays:
    leaves = pytree.tree_leaves(values)
    return [leaf.detach().cpu().numpy() for leaf in leaves if isinstance(leaf, Tensor)]


def _name_inputs(session: Session, inputs: Inputs) -> Feeds | None:
    """The example by the names of the file's inputs; None where they do not fit."""
    names = [value.name for value in session.inputs]
    if not inputs.args and set(names) <= set(inputs.kwargs):
        return {
            name: np.asarray(torch.as_tensor(inputs.kwargs[name]).detach().cpu()) for name in names
        }
    arrays = _list_arrays(inputs)
    return dict(zip(names, arrays, strict=True)) if len(names) == len(arrays) else None
