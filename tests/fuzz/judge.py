"""Is what onnxq made right? Judged by onnx.checker and ONNX Runtime themselves, not by onnxq's own account."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import onnxq
from onnxq.graph import find_opset, load_model, name_nodes
from onnxq.graph.convert import limit_opset
from onnxq.plan import from_json, to_json
from onnxq.runtime import find_runnable_opset
from tests.fuzz.case import Wrong
from tests.networks import open_session

# Operators that choose by values: a rounding changes positions, and how many there are.
_CHOOSING = {"NonMaxSuppression", "NonZero", "Unique", "Compress", "TopK", "ArgMax", "ArgMin"}
# Below this the answers have nothing to do with the float model's; onnxq itself warns from 10 dB on, on other samples.
FAR_DB = 3.0
# Two roundings of one network agree to more, and an engine's is as near to float as the file's.
DISAGREES_DB, LOSS_DB = 18.0, 4.0
_ABSURD = 1e15
Feeds = Mapping[str, np.ndarray]


def open_original(source: Path | onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session of a float model as it is, or, where ONNX Runtime refuses that, as onnxq mends it."""
    try:
        return open_session(source, optimize=False)
    except Exception:
        # External data taken in, nodes sorted and named, initializers that were inputs too, an opset ahead of ORT's.
        proto = name_nodes(load_model(source).proto)
        return open_session(limit_opset(proto, find_runnable_opset(find_opset(proto))), optimize=False)


def check_file(
    path: Path, *, optimize: bool = True, source: Path | onnx.ModelProto | None = None
) -> onnxruntime.InferenceSession:
    """The written model, loaded. Raises Wrong where onnx.checker or ONNX Runtime refuse it.

    source: the model it was made from; ONNX Runtime takes more than the checker, which may refuse both.
    """
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        if source is None or _passes(source):
            raise Wrong(f"onnx.checker refuses the file: {error}") from error
    try:
        return open_session(path, optimize=optimize)
    except Exception as error:
        raise Wrong(f"ONNX Runtime refuses the file: {error}") from error


def _passes(source: Path | onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(source if isinstance(source, onnx.ModelProto) else str(source))
    except Exception:
        return False
    return True


def check_annotated(path: Path, source: Path) -> None:
    """Raise Wrong where onnx.checker or ONNX Runtime refuse an annotated model and took it before."""
    try:
        open_session(source, optimize=False)
    except Exception:
        return
    check_file(path, optimize=False, source=source)


def check_result(
    result: onnxq.Result, path: Path, source: Path | onnx.ModelProto, samples: Sequence[Feeds], *, target: str = "ort"
) -> None:
    """Raise Wrong unless the file loads, its answers are the float model's or warned of, and its plan reads back.

    Of a model with a plugin of another engine only the plan is checked.
    samples: feeds that the float model was calibrated on; () where nothing can be compared.
    """
    check_plan(result.plan)
    if _needs_plugin(source):
        return
    try:
        quantized = check_file(path, optimize=target == "ort", source=source)
    except Wrong as error:
        if _says_not_run(result, target, error):
            return
        raise
    warned = (*result.report.warnings, *result.report.alarms())
    if not samples or _absurd(path):
        return
    try:
        original = open_original(source)
    except Exception as error:
        # bfloat16, which onnxq computes in float32, and what only the newest opset has of it.
        if "NOT_IMPLEMENTED" in str(error) or getattr(error, "code", "") == "Q109":
            return
        raise
    chooses = bool(_CHOOSING & {node.op_type for node in onnx.load(path).graph.node})
    totals: dict[int, np.ndarray] = {}
    for feeds in samples:
        try:
            before = original.run(None, dict(feeds))
        except Exception:  # it runs on single items only, which is how onnxq may feed it
            return
        if any(_has_nan(one) for one in before):  # a rounding decides which values are NaN and which are not
            return
        try:
            after = quantized.run(None, dict(feeds))
        except Exception as error:
            if _says_not_run(result, target, error):
                return
            raise Wrong(f"ONNX Runtime cannot run the file, and nothing says so: {error}") from error
        for at, (one, other) in enumerate(zip(before, after, strict=True)):
            if chooses and (np.shape(one) != np.shape(other) or np.asarray(one).dtype.kind in "iu"):
                continue
            totals[at] = totals.get(at, 0) + _energies(one, other)
    worst = min((_sqnr(signal, noise) for signal, noise in totals.values()), default=math.inf)
    if worst < FAR_DB and not warned:
        raise Wrong(f"the answers are far from the float model's: {worst:.1f} dB, and nothing says so")


def check_engines(result: onnxq.Result) -> None:
    """Raise Wrong where an engine that runs here refuses the file alone, or answers otherwise than the file says.

    A warning of it is no excuse: whoever forces nothing gets what the engine is known to compute.
    """
    for engine in result.report.engines:
        if "takes the float model" in engine.refusal:
            raise Wrong(f"{engine.engine} refuses the file: {engine.reason}")
        said = {check.name: check.sqnr_db[0] for check in result.report.checks}
        for output in engine.outputs:
            # What the engine makes of the float model tells operators that it computes otherwise in any file.
            least = min(said.get(output.name, math.inf), output.float_db) - LOSS_DB
            if output.agreement_db < DISAGREES_DB and output.sqnr_db < least:
                figures = f"{output.agreement_db:.1f} dB from the file, {output.sqnr_db:.1f} from float"
                raise Wrong(f"{engine.engine} answers otherwise than the file says: {output.name} is {figures}")


def _says_not_run(result: onnxq.Result, target: str, error: Exception) -> bool:
    """True for a file in types of another engine, of which the CPU has not every kernel, where a warning says so."""
    signs = ("NOT_IMPLEMENTED", "Could not find an implementation", "data type is not supported")
    lacks = any(sign in str(error) for sign in signs)
    return target != "ort" and lacks and "W116" in {warning.code for warning in result.report.warnings}


def _needs_plugin(source: Path | onnx.ModelProto) -> bool:
    """True for a model with an operator that ONNX Runtime does not have, so that it can run no file made of it."""
    try:
        open_original(source)
    except Exception as error:
        return "is not a registered function/op" in str(error) or "No Op registered for" in str(error)
    return False


def _absurd(path: Path) -> bool:
    """True for a model with numbers so great that roundings decide what becomes infinite or overshadows the rest."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor)
            if values.size and not float(np.abs(values).max()) < _ABSURD:
                return True
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(not abs(attribute.f) < _ABSURD for node in nodes for attribute in node.attribute)


def _has_nan(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool(np.isnan(value).any())


def check_plan(plan: onnxq.Plan) -> None:
    """Raise Wrong unless a plan is the same after it was written and read."""
    text = to_json(plan)
    if to_json(from_json(text)) != text:
        raise Wrong("the plan changes when it is written and read")


def _energies(before: object, after: object) -> np.ndarray:
    """Signal and noise of one sample over the finite values; zeros for what has no numbers."""
    if not isinstance(before, np.ndarray) or before.dtype.kind not in "fiub" or before.size == 0:
        return np.zeros(2)
    if before.shape != after.shape or before.dtype != after.dtype:
        raise Wrong(f"an output was {before.dtype}{before.shape} and is {after.dtype}{after.shape}")
    ref, got = before.astype(np.float64), after.astype(np.float64)
    # What is near float32's greatest number may become infinite by a rounding.
    finite = np.abs(np.nan_to_num(ref, nan=np.inf)) < 1e36
    ref, got = ref[finite], got[finite]
    if not np.isfinite(got).all():
        return np.array([0.0, math.inf])
    return np.array([(ref**2).sum(), ((got - ref) ** 2).sum()])


def _sqnr(signal: float, noise: float) -> float:
    """dB; inf where there is nothing to lose beyond float32's precision of the greatest value."""
    if math.isinf(noise):
        return -math.inf
    if noise <= signal * 1e-12 or signal == 0.0 or not math.isfinite(signal):
        return math.inf
    return 10 * math.log10(signal / noise)
