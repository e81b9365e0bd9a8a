"""Cross-validation of ranges: each sample is judged on ranges it had no part in, weights and clipping stay."""

from dataclasses import replace

import numpy as np
import pytest

from onnxq.calibrate import calibrate
from onnxq.data import load_data
from onnxq.graph import get_index
from onnxq.numerics import clip_bounds
from onnxq.passes.base import SampledContext
from onnxq.passes.mixed_precision.cross_validation import Fold, split_folds, widen_ranges
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan
from onnxq.sites import Role
from onnxq.spec import ObserverSpec
from tests.passes.context import make_context, place
from tests.passes.kit import make_state
from tests.planner.kit import FORCE, draft, network

# The values themselves are the input's range, which the order of the samples does not show.
TOPS = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0]


@pytest.fixture(scope="module")
def run() -> tuple[SampledContext, PlacedState]:
    model = network("g (float[1,16] x) => (float[1,16] y) { m = MatMul(x, w) y = Relu(m) }", w=(16, 16))
    rows = np.random.default_rng(0).random((8, 16), np.float32) * 0.5
    rows[:, 0] = TOPS
    data = load_data({"x": rows[:, None]}, get_index(model).inputs)
    problem = draft(model, FORCE)
    plan = calibrate(problem.proto, problem.default(), data)
    state = place(replace(make_state(model), model=problem.proto), plan, problem)
    return make_context(data.part(range(6)), data.part([6, 7])), state


def top(plan: Plan) -> float:
    site = next(site for site in plan.sites if site.role is Role.ACTIVATION and str(site.site) == "x")
    return float(clip_bounds(site.qparams, site.spec)[1])


def own(fold: Fold) -> list[float]:
    return [float(sample["x"].max()) for sample in fold.samples.samples()]


def test_every_sample_is_in_one_fold_on_ranges_of_the_others(run) -> None:
    ctx, state = run
    folds = split_folds(ctx, state)
    assert len(folds) == 4
    assert sorted(value for fold in folds for value in own(fold)) == sorted(TOPS)
    for fold in folds:
        others = max(value for value in TOPS if value not in own(fold))
        assert top(fold.narrow_ranges(state.model, state.plan)) == pytest.approx(others, rel=0.01)


def test_weights_and_ranges_that_clip_already_stay(run) -> None:
    ctx, state = run
    plan = state.plan
    clipped = plan.with_sites(
        tuple(
            replace(site, qparams=replace(site.qparams, scale=np.float32(2.0 / 255)))
            if str(site.site) == "x" and site.qparams is not None else site
            for site in plan.sites
        )
    )  # fmt: skip
    for fold in split_folds(ctx, state):
        assert top(fold.narrow_ranges(state.model, clipped)) == pytest.approx(2.0, rel=0.01)
        narrow = fold.narrow_ranges(state.model, plan)
        weights = [[site.qparams for site in one.sites if site.role is Role.WEIGHT] for one in (plan, narrow)]
        assert weights[0] == weights[1]


def test_ranges_of_all_values_widen_and_those_that_clip_by_intention_do_not(run) -> None:
    ctx, state = run
    wider = widen_ranges(state.model, state.plan, 1.1)
    assert top(wider) == pytest.approx(1.1 * 9.0, rel=0.01)
    fold = max(split_folds(ctx, state), key=lambda fold: max(own(fold)))
    assert top(fold.narrow_ranges(state.model, wider)) == pytest.approx(1.1 * 6.0, rel=0.01)
    percentile = state.plan.with_sites(
        tuple(replace(site, observer=ObserverSpec("percentile")) for site in state.plan.sites)
    )
    assert widen_ranges(state.model, percentile, 1.1) is percentile


def test_without_ranges_of_samples_there_is_one_fold(run) -> None:
    ctx, state = run
    weights = replace(state, plan=state.plan.with_sites(
        tuple(site for site in state.plan.sites if site.role is Role.WEIGHT)))  # fmt: skip
    (fold,) = split_folds(ctx, weights)
    assert sorted(own(fold)) == sorted(TOPS)
    assert fold.narrow_ranges(state.model, weights.plan) is weights.plan
