"""The engine that a model is proved on when the caller names none."""

from __future__ import annotations

from onnx import ModelProto

from onnxq.annotate import read_plan_note
from onnxq.backends import find_target
from onnxq.engines.builder.library import RTX


def choose_engine(proto: ModelProto, capability: str | None) -> tuple[str, str]:
    """The engine for a model, and why in a few words.

    capability: the GPU that was asked for; only one engine builds for a GPU that is not there.
    """
    if capability is not None:
        return RTX, "a compute capability was given"
    plan = read_plan_note(proto)
    if plan is None:
        return RTX, "the default: the file holds no plan"
    engine = find_target(plan.target).library
    if not engine:
        return RTX, f"the default: the plan in the file is for {plan.target}"
    return engine, f"the plan in the file is for {plan.target}"
