"""Where passes that live on sums of errors apply: on networks that compute in float32, with real samples."""

from __future__ import annotations

from onnxq.graph.half import computes_in_half
from onnxq.passes.base import RunContext
from onnxq.passes.journal import Outcome
from onnxq.passes.state import State


def needs_float32(ctx: RunContext, state: State) -> bool | Outcome:
    """True where samples are real; HALF_PRECISION where the sums need more digits than float16 operators give."""
    if computes_in_half(state.model):
        return Outcome.HALF_PRECISION
    return not ctx.data.synthetic
