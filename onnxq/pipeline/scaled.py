"""Scaling and shifting channels before planning; each pass proved, tried out, rolled back if it harms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from onnxq.calibrate import calibrate
from onnxq.data import Dataset
from onnxq.errors import OnnxqError, PlanError
from onnxq.evaluation.accumulator import Array, OutputError
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.graph import GraphIndex, index_of, infer_shapes, structural_ids
from onnxq.passes import PassReport
from onnxq.passes.absorb import chosen_shifts, shift_axes, with_shifts
from onnxq.passes.activity import observe_channels
from onnxq.passes.equalize import channel_axes, equalized, equalizing_factors
from onnxq.passes.smooth import quantized_groups, smoothed, smoothing_factors
from onnxq.pipeline.judging import before_rounding, trial_session
from onnxq.pipeline.prepared import EQUIVALENT_DB, PreparedModel, reported
from onnxq.plan import Plan, Scaling
from onnxq.progress import Progress
from onnxq.runtime import Session
from onnxq.sites import Refusal, TensorId

NAMES = ("equalize", "absorb", "smooth")
# Largest values of channels settle early; a layer's error needs few rows; a trial needs few samples.
_SAMPLES, _ROWS, _TRIAL, _PROOF = 16, 256, 4, 2
# Errors on a few samples are this uncertain, in dB.
_NOISE = 0.3


@dataclass(frozen=True, eq=False)
class Scene:
    """What the passes work with. place: the plan, without numbers, that a prepared model would get."""

    calibration: Dataset
    held: Dataset
    place: Callable[[PreparedModel], Plan]
    progress: Progress
    batch: int | None = None
    memory_limit: int | None = None


def scale_channels(
    prepared: PreparedModel, scene: Scene, *, skip: Iterable[str] = ()
) -> tuple[PreparedModel, tuple[Scaling, ...]]:
    """The prepared model with channels scaled where that helps, and what `rescaled` needs to do it again.

    A pass whose rewrite changes the float outputs beyond rounding on held-back samples is rolled back, and so is one
    after which the quantized model's outputs are further from the float ones; its report says so.
    """
    ids, first = structural_ids(prepared.proto), prepared.proto
    few = FloatOutputs(first, scene.calibration.take(_TRIAL).joined(scene.held))
    held = FloatOutputs(first, scene.held)
    done: tuple[Scaling, ...] = ()
    best: float | None = None
    for name, choose in (("equalize", _equalizing), ("absorb", _absorbing), ("smooth", _smoothing)):
        if name in skip:
            continue
        factors, lines = choose(prepared, scene)
        if not factors:
            prepared = reported(prepared, PassReport(name, (), _left(name, lines)))
            continue
        kinds = tuple(
            Scaling(name=name, tensor=t, factors=np.asarray(s, np.float32), anchor=ids.get(t, ""))
            for t, s in factors.items()
        )
        after = _rewritten(prepared, name, factors)
        proof = _difference(held, after.proto, scene.progress)
        worst = max((one.max_abs for one in proof), default=0.0)
        equal = all(one.whole_db >= EQUIVALENT_DB or one.max_abs < 1e-6 for one in proof)
        best = _trial(prepared, scene, few) if best is None and equal else best
        now = _trial(after, scene, few) if equal else None
        if now is None or best is None or now < best - _NOISE:
            why = (
                f"it changed the float outputs by up to {worst:.3g}"
                if not equal
                else f"the quantized outputs fell from {best or 0.0:.1f} to {now or 0.0:.1f} dB"
            )
            refusal = Refusal(name, f"rolled back: {why}", "", name, "R112")
            prepared = reported(prepared, PassReport(name, (), (refusal,)))
            continue
        told = f"{len(factors)} tensors, max |difference| {worst:.3g}, {best:.1f} -> {now:.1f} dB in a trial"
        prepared = reported(after, PassReport(name, (told, *lines), ()))
        done, best = (*done, *kinds), now
    return prepared, done


def rescaled(prepared: PreparedModel, scalings: Sequence[Scaling]) -> PreparedModel:
    """Repeat what a plan recorded, on its model or on the same network exported again.

    Raises PlanError for a tensor that is not there, or that cannot take the factors.
    """
    if not scalings:
        return prepared
    index, ids = index_of(prepared.proto), structural_ids(prepared.proto)
    by_id: dict[str, list[TensorId]] = {}
    for tensor, anchor in ids.items():
        by_id.setdefault(anchor, []).append(tensor)
    for strange in (one.name for one in scalings if one.name not in NAMES):
        raise PlanError(f"scalings: {strange}", "there is no such pass", f"use one of {', '.join(NAMES)}", code="Q403")
    for name in NAMES:
        factors = {_found(one, index, ids, by_id): one.factors for one in scalings if one.name == name}
        if factors:
            told = PassReport(name, (f"{len(factors)} tensors, as the plan says",), ())
            prepared = reported(_rewritten(prepared, name, factors), told)
    return prepared


def _found(
    one: Scaling, index: GraphIndex, ids: Mapping[TensorId, str], by_id: Mapping[str, Sequence[TensorId]]
) -> TensorId:
    there = index.resolve(one.tensor.name, one.tensor.scope) == one.tensor
    if there and one.anchor in ("", ids.get(one.tensor, "")):
        return one.tensor
    alike = by_id.get(one.anchor, ())
    if len(alike) != 1:
        raise PlanError(
            str(one.tensor), "is scaled by the plan but not in this model", "plan the model again", code="Q404"
        )
    return alike[0]


def _rewritten(prepared: PreparedModel, name: str, factors: Mapping[TensorId, Array]) -> PreparedModel:
    given = {tensor: np.asarray(s, np.float32) for tensor, s in factors.items()}
    if name == "equalize":
        proto = equalized(prepared.proto, given)[0]
    else:
        proto = with_shifts(prepared.proto, given) if name == "absorb" else smoothed(prepared.proto, given)
    return replace(prepared, proto=infer_shapes(proto))


def _left(name: str, lines: Sequence[str]) -> tuple[Refusal, ...]:
    return tuple(Refusal(line.partition(":")[0], line.partition(": ")[2], "", name, "R112") for line in lines)


Chosen = tuple[Mapping[TensorId, Array], tuple[str, ...]]


def _equalizing(prepared: PreparedModel, scene: Scene) -> Chosen:
    few = scene.calibration.take(_SAMPLES)
    axes = channel_axes(prepared.proto)
    seen = observe_channels(
        prepared.proto, axes, few, progress=scene.progress, title="equalizing", memory_limit=scene.memory_limit
    )
    largest = {tensor: np.maximum(np.abs(one.low), np.abs(one.high)) for tensor, one in seen.items()}
    factors = equalizing_factors(prepared.proto, largest if len(largest) == len(axes) else None)
    return factors, tuple(f"{tensor}: equalized" for tensor in factors)


def _absorbing(prepared: PreparedModel, scene: Scene) -> Chosen:
    few, axes = scene.calibration.take(_SAMPLES), shift_axes(prepared.proto)
    seen = observe_channels(
        prepared.proto, axes, few, progress=scene.progress, title="absorbing", memory_limit=scene.memory_limit
    )
    low, high = ({tensor: getattr(one, end) for tensor, one in seen.items()} for end in ("low", "high"))
    found = chosen_shifts(prepared.proto, low, high)
    return found, tuple(f"{tensor}: channels centred" for tensor in found)


def _smoothing(prepared: PreparedModel, scene: Scene) -> Chosen:
    plan = scene.place(prepared)
    axes = {group.tensor: -1 for group in quantized_groups(prepared.proto, plan)}
    seen = observe_channels(
        prepared.proto,
        axes,
        scene.calibration,
        progress=scene.progress,
        title="smoothing",
        rows=_ROWS,
        batch=scene.batch,
        memory_limit=scene.memory_limit,
    )
    found = smoothing_factors(prepared.proto, plan, seen)
    return found.factors, found.lines


def _trial(prepared: PreparedModel, scene: Scene, few: FloatOutputs) -> float | None:
    """dB of the worst output of the model quantized on the samples of `few` against the float one; None if it cannot.

    Judged on the samples that gave the ranges: what others are clipped at is chance, and not what scaling is about.
    """
    try:
        plan = before_rounding(scene.place(prepared))
        done = calibrate(prepared.proto, plan, few.samples, memory_limit=scene.memory_limit, progress=scene.progress)
        if not done.sites or not done.calibrated:
            return None
        with scene.progress("judging", len(few.samples)) as task:
            found = few.measure(trial_session(prepared, done), tick=task.advance).results()
    except OnnxqError:
        return None
    return min((min(one.sqnr_db, 200.0) for one in found), default=None)


def _difference(floats: FloatOutputs, after: onnx.ModelProto, progress: Progress) -> tuple[OutputError, ...]:
    """Both float models on held-back samples, output by output."""
    with progress("comparing with the model before", min(_PROOF, len(floats.samples))) as task:
        return floats.measure(Session(after, optimize=False), limit=_PROOF, tick=task.advance).results()
