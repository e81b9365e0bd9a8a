"""An equalized model is compared with the float one, and judged quantized; where either cannot be, it is given up."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.passes.base import EqualizeContext
from onnxq.passes.equalization.passes import (
    EQUALIZED,
    check_equivalent,
    gains_by_rotation,
    score_equalized,
    score_rotated,
)
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.state import FloatState
from onnxq.plan import Plan
from onnxq.progress import Progress
from onnxq.sites import Role
from tests.passes.context import make_context
from tests.passes.kit import make_state, parse
from tests.planner.kit import FORCE, draft

TEXT = "g (float[1,4,8,8] x) => (float[1,4,8,8] y) { c = Conv(x, w) r = Relu(c) y = Conv(r, v) }"
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal((4, 4, 1, 1)).astype(np.float32) for name in "wv"}
KEPT = PassReport("made up", changed=("c: scaled",))


def model(**changed: np.ndarray) -> onnx.ModelProto:
    return infer_shapes(parse(TEXT, **{**WEIGHTS, **changed}))


def state(proto: onnx.ModelProto) -> FloatState:
    return make_state(proto)


def place(one: FloatState, progress: Progress) -> Plan:
    return draft(one.model, FORCE, effort="fast").default()


@pytest.fixture(scope="module")
def reference() -> onnx.ModelProto:
    return model()


@pytest.fixture
def ctx(reference: onnx.ModelProto) -> EqualizeContext:
    x = RNG.standard_normal((6, 1, 4, 8, 8)).astype(np.float32)
    made = make_context(load_data({"x": x}, GraphIndex(reference).inputs, DataConfig()))
    return made.add_reference(reference, place)


def scaled(factor: Any, back: Any) -> FloatState:
    """Channels of the first weight times `factor`, columns of the second times `back`."""
    w = (WEIGHTS["w"] * np.reshape(factor, (-1, 1, 1, 1))).astype(np.float32)
    v = (WEIGHTS["v"] * np.reshape(back, (1, -1, 1, 1))).astype(np.float32)
    return state(model(w=w, v=v))


FACTORS = np.array([0.3, 7.0, 1.0, 100.0])


@pytest.mark.parametrize(("back", "outcome"), [(1.0, Outcome.KEPT), (1.01, Outcome.NOT_EQUIVALENT)])
def test_the_same_function_is_kept_with_the_difference_that_rounding_makes(ctx, back, outcome):
    report = check_equivalent(ctx, scaled(FACTORS, back / FACTORS), KEPT)
    kept = outcome is Outcome.KEPT
    assert (report.outcome, report.changed) == (outcome, KEPT.changed if kept else ())
    assert 0 < report.difference < 1e-4 if kept else report.difference > 1e-3


def test_an_output_of_zeros_has_no_decibels_and_is_the_same_function(ctx):
    nothing = np.zeros_like(WEIGHTS["v"])
    ctx = ctx.add_reference(model(v=nothing), place)
    assert check_equivalent(ctx, state(model(v=nothing)), KEPT).outcome is Outcome.KEPT
    # Rounding may make it another zero.
    tiny = (WEIGHTS["v"] * 1e-9).astype(np.float32)
    assert check_equivalent(ctx, state(model(v=tiny)), KEPT).outcome is Outcome.KEPT
    assert check_equivalent(ctx, state(model(v=tiny * 1e4)), KEPT).outcome is Outcome.NOT_EQUIVALENT


def test_the_score_is_of_the_worst_output_and_computed_once(ctx, reference):
    calls = []
    ctx = replace(ctx, place=lambda one, progress: calls.append(one) or place(one, progress))
    one = state(reference)
    score = score_equalized(ctx, one)
    assert 20 < score < 80
    # Another state of the same model has that model's score.
    assert score_equalized(ctx, state(reference)) == score
    assert len(calls) == 1
    uneven = score_equalized(ctx, scaled(np.geomspace(1e-3, 1e3, 4), np.geomspace(1e3, 1e-3, 4)))
    assert uneven < score - 5
    assert len(calls) == 2


@pytest.mark.parametrize("why", ["the planner refuses", "nothing is quantized"])
def test_a_model_that_cannot_be_quantized_has_no_score(ctx, reference, why):
    def refuse(one: FloatState, progress: Progress) -> Plan:
        if why == "nothing is quantized":
            return replace(place(one, progress), sites=())
        raise PlanError("c", "cannot be planned")

    ctx = replace(ctx, place=refuse)
    assert score_equalized(ctx, state(reference)) is None
    # That is remembered, too.
    assert ctx.base.scores[id(reference)] == (reference, None)


@pytest.mark.parametrize(("after", "kept"), [(30.0, True), (29.8, True), (29.4, False), (35.0, True)])
def test_what_noise_alone_may_cost_is_kept(ctx, reference, after, kept):
    one = state(reference)
    assert EQUALIZED.allows(ctx, one, one, 30.0, after) == kept


@pytest.mark.parametrize(
    ("mode", "gain", "kept"),
    [("static", 0.4, False), ("static", 0.6, True), ("weight-only", 2.0, False), ("weight-only", 3.1, True)],
)
def test_a_rotation_must_gain_and_more_where_weights_alone_are_rounded(ctx, mode, gain, kept):
    asked = replace(ctx, config=ctx.config.model_copy(update={"mode": mode}))
    assert gains_by_rotation(asked, 20.0, 20.0 + gain) is kept


@pytest.mark.parametrize("bits", [8, 3])
def test_a_rotation_is_judged_with_weights_of_few_bits(ctx, reference, bits):
    def place_narrow(one: FloatState, progress: Progress) -> Plan:
        plan = place(one, progress)
        sites = (replace(s, spec=replace(s.spec, bits=bits)) if s.role is Role.WEIGHT else s for s in plan.sites)
        return replace(plan, sites=tuple(sites))

    made = replace(ctx, place=place_narrow)
    plain, rotated = score_equalized(made, state(reference)), score_rotated(made, state(reference))
    assert (rotated < plain - 1) is (bits == 3)
