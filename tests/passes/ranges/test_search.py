"""Ranges chosen by the error behind the operator that reads them: what decides, what is left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.base import Stage
from onnxq.passes.judging import Evaluator
from onnxq.passes.ranges import passes
from onnxq.passes.ranges.search import WIDENED, choose_ranges
from onnxq.passes.runner import run_stage
from onnxq.plan import Plan
from onnxq.progress import silent
from onnxq.sites import Role, TensorId
from tests.passes.context import make_context, place
from tests.passes.kit import parse
from tests.passes.ranges.kit import deaf, linear, prepared_plan, tokens
from tests.pipeline.models import images, residual


def picked(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Plan, Plan, dict[str, str]]:
    prepared, plan = prepared_plan(proto, feeds)
    inputs = GraphIndex(prepared.model).inputs
    samples = list(load_data(feeds, inputs).samples())
    done = choose_ranges(prepared.model, plan, samples[4:], samples[:4], observed=len(samples), progress=silent)
    return plan, done.plan, {str(site): name for site, name in done.taken.items()}


def scale(plan: Plan, name: str) -> float:
    numbers = next(s.qparams for s in plan.sites if s.site == TensorId(name) and s.role is Role.ACTIVATION)
    assert numbers is not None
    return float(numbers.scale)


def test_what_a_range_would_cut_off_is_judged_wherever_it_is() -> None:
    # The only loud sample is neither held back nor one of the dozen that are looked at again.
    feeds = tokens(44)
    feeds["x"][[0, 5], 0, 0] = 1.0
    assert 9 - 4 not in np.linspace(0, 39, 12).astype(int)
    feeds["x"][9, 0, 0] = 100.0
    before, after, taken = picked(linear(1.0), feeds)
    assert not taken
    assert scale(after, "x") == scale(before, "x") > 0.3


def test_the_outputs_are_judged_on_samples_of_the_calibration_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    real = Evaluator.score
    monkeypatch.setattr(
        Evaluator, "score", lambda self, *a, **b: counts.append(len(self.samples)) or real(self, *a, **b)
    )
    feeds = tokens(16)
    feeds["x"][:, 0, 0] = 100.0
    state, plan = prepared_plan(linear(1e-6), feeds)
    data = load_data(feeds, GraphIndex(state.model).inputs)
    ctx = make_context(*data.split(4, 0))
    run_stage(passes.RANGES, Stage.REFINE, ctx, place(state, plan))
    assert counts == [4 + 8, 4 + 8]


def test_an_outlier_that_no_weight_hears_is_cut_off() -> None:
    before, after, taken = picked(linear(0.0), tokens(400))
    assert taken["x"] != "minmax"
    assert scale(after, "x") < 0.2 * scale(before, "x")


def test_an_outlier_that_matters_keeps_its_range() -> None:
    before, after, _ = picked(linear(1.0), tokens(400))
    assert scale(after, "x") > 0.99 * scale(before, "x")


def test_padding_is_not_looked_at() -> None:
    before, after, _ = picked(linear(1.0), tokens(400, padding=1e3))
    assert scale(after, "x") < 0.2 * scale(before, "x")


def test_what_follows_from_a_range_follows_it() -> None:
    feeds = images(48)
    feeds["x"][[10, 20], 0, 0, 0] = 40.0
    prepared, plan = prepared_plan(deaf(), feeds)
    samples = list(load_data(feeds, GraphIndex(prepared.model).inputs).samples())
    done = choose_ranges(prepared.model, plan, samples[8:], samples[:8], observed=len(samples), progress=silent)
    assert done.taken
    numbers = {site.site: site.qparams for site in done.plan.sites}
    biases = [site for site in done.plan.sites if site.derived is not None]
    assert any(site.derived[0] in done.taken for site in biases if site.derived is not None)
    for site in biases:
        assert site.derived is not None
        x, w, found = (numbers[one] for one in (*site.derived, site.site))
        assert x is not None
        assert w is not None
        assert found is not None
        np.testing.assert_allclose(found.scale, x.scale * w.scale, rtol=1e-6)


def test_groups_keep_one_scale_and_the_same_samples_give_the_same_plan() -> None:
    prepared, plan = prepared_plan(residual(), images(24))
    sites = [site for site in plan.sites if site.role is Role.ACTIVATION][:2]
    joined = replace(
        plan, sites=tuple(replace(s, group="g", qparams=sites[0].qparams) if s in sites else s for s in plan.sites)
    )
    samples = list(load_data(images(24), GraphIndex(prepared.model).inputs).samples())
    runs = [
        choose_ranges(prepared.model, joined, samples[4:], samples[:4], observed=len(samples), progress=silent)
        for _ in range(2)
    ]
    assert not {site.site for site in sites} & set(runs[0].taken)
    assert runs[0].plan == runs[1].plan


@pytest.mark.parametrize(("count", "factor"), [(32, 1.25), (128, 1.0)])
def test_ranges_of_few_positions_reach_further(count: int, factor: float) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((count, 16)).astype(np.float32)}
    proto = parse("g (float[N,16] x) => (float[N,4] y) { y = MatMul(x, w) }", w=np.ones((16, 4), np.float32))
    before, after, taken = picked(proto, feeds)
    assert (taken.get("x") == WIDENED) == (factor > 1)
    assert scale(after, "x") <= 1.0001 * factor * scale(before, "x")
    assert factor == 1 or scale(after, "x") == pytest.approx(factor * scale(before, "x"), rel=1e-4)


def test_widened_ranges_stay_within_what_an_operator_can_give() -> None:
    feeds = {"x": 20 * np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}
    text = "g (float[N,16] x) => (float[N,4] y) { s = Sigmoid(x) y = MatMul(s, w) }"
    before, after, taken = picked(parse(text, w=np.ones((16, 4), np.float32)), feeds)
    assert "s" not in taken
    assert scale(after, "s") == scale(before, "s")
