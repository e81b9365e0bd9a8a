"""Ranges chosen by the error behind the operator that reads them: what decides, what is left alone."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.calibrate import calibrate
from onnxq.config import Config, TensorConfig
from onnxq.data import load_data
from onnxq.errors import CalibrationError
from onnxq.graph import GraphIndex
from onnxq.numerics import qparams_from_range
from onnxq.observers import create_observer
from onnxq.passes import ranges
from onnxq.passes.base import Stage, run_stage
from onnxq.passes.journal import Outcome
from onnxq.passes.judging import Evaluator
from onnxq.passes.ranges import RangeCandidates, choose_candidate, choose_ranges
from onnxq.passes.state import FloatState
from onnxq.pipeline.prepared import load_state
from onnxq.plan import Plan
from onnxq.progress import silent
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, QuantSpec
from tests.passes.context import make_context, place
from tests.passes.kit import parse
from tests.passes.rounding.kit import ALL
from tests.pipeline.models import images, residual

MINMAX = Config(rules=ALL)


def linear(outlier: float) -> onnx.ModelProto:
    """A MatMul whose weights for channel 0 are this large."""
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    weight[0] = outlier * np.sign(weight[0])
    text = "g (float[N, 64, 4] x, int64[N, 64] attention_mask) => (float[N, 64, 6] y) { y = MatMul(x, w) }"
    return parse(text, w=weight)


def tokens(count: int, *, seed: int = 0, padding: float = 1.0) -> dict[str, np.ndarray]:
    """Channel 0 is a hundred times as large as the others, in two samples; the last half of each sample is padding."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 64, 4)).astype(np.float32)
    x[[0, 5], 0, 0] = 100.0
    x[:, 32:] *= padding
    mask = np.ones((count, 64), np.int64)
    mask[:, 32:] = 0
    return {"x": x, "attention_mask": mask}


def prepared_plan(
    proto: onnx.ModelProto, feeds: dict[str, np.ndarray], config: Config = MINMAX
) -> tuple[FloatState, Plan]:
    prepared = load_state(proto)
    data = load_data(feeds, GraphIndex(prepared.model).inputs)
    return prepared, calibrate(prepared.model, onnxq.make_plan(proto, feeds, config), data)


def deaf() -> onnx.ModelProto:
    """`residual` whose first convolution does not hear channel 0."""
    proto = residual()
    held = next(tensor for tensor in proto.graph.initializer if tensor.name == "w0")
    weight = numpy_helper.to_array(held).copy()
    weight[:, 0] = 0.0
    held.CopyFrom(numpy_helper.from_array(weight, "w0"))
    return proto


def picked(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Plan, Plan, dict[str, str]]:
    prepared, plan = prepared_plan(proto, feeds)
    inputs = GraphIndex(prepared.model).inputs
    samples = list(load_data(feeds, inputs).samples())
    done = choose_ranges(prepared.model, plan, samples[4:], samples[:4], progress=silent)
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
    run_stage(ranges.RANGES, Stage.REFINE, ctx, place(state, plan))
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
    done = choose_ranges(prepared.model, plan, samples[8:], samples[:8], progress=silent)
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
    runs = [choose_ranges(prepared.model, joined, samples[4:], samples[:4], progress=silent) for _ in range(2)]
    assert not {site.site for site in sites} & set(runs[0].taken)
    assert runs[0].plan == runs[1].plan


def test_in_a_run_it_is_told_skipped_and_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MINMAX.model_copy(
        update={"effort": "balanced", "skip": ("cross_layer_equalization", "smoothquant", "rounding", "promotion")}
    )
    feeds = images(48)
    feeds["x"][[10, 20], 0, 0, 0] = 40.0

    def told(config: Config, data: object = feeds) -> list[str]:
        found = onnxq.quantize(deaf(), data, config, overrides={"latency": False})
        return [line for line in found.report.accounts if line.startswith("ranges: ")]

    line = told(config)[0]
    assert "in a trial" in line
    assert re.search(r"in place of the observer minmax at \w+.*: what reads these loses less so", line)
    assert "`skip: [ranges]` keeps the observer's" in line
    assert told(config.model_copy(update={"skip": (*config.skip, "ranges")})) == []
    assert told(config.model_copy(update={"effort": "fast"})) == []
    assert told(config, None) == []
    scores = iter((20.0, 19.0))
    monkeypatch.setattr(Evaluator, "score", lambda *_, **__: next(scores))
    state, plan = prepared_plan(deaf(), feeds)
    ctx = make_context(load_data(feeds, GraphIndex(state.model).inputs))
    after = run_stage(ranges.RANGES, Stage.REFINE, ctx, place(state, plan))
    assert after.plan is plan
    assert [report.outcome for report in ctx.journal] == [Outcome.WORSE]


def test_weights_alone_have_no_ranges_to_choose() -> None:
    config = Config(mode="weight-only", rules=ALL, weights=TensorConfig(granularity="channel"))
    prepared, plan = prepared_plan(linear(1.0), tokens(8), config)
    samples = list(load_data(tokens(8), GraphIndex(prepared.model).inputs).samples())
    assert choose_ranges(prepared.model, plan, samples, samples, progress=silent).plan == plan


# ---- Candidates for a range, and when another is better.


def test_candidates_are_those_of_the_observers_without_repeats() -> None:
    spec = QuantSpec(signed=False, symmetric=False)
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    ranges = RangeCandidates(spec)
    ranges.add_sample(values[:20_000])
    ranges.add_sample(values[20_000:])
    found = ranges.list_qparams((None, None))
    assert set(found) == {"minmax", "percentile 99.999", "percentile 99.99", "mse", "entropy"}
    for name, one in (("mse", ObserverSpec("mse")), ("entropy", ObserverSpec("entropy"))):
        alone = create_observer(one, spec)
        alone.update(values)
        assert float(found[name].scale) == float(qparams_from_range(*alone.range(), spec).scale)
    wide = float(found["minmax"].scale) * 255
    assert wide == pytest.approx(float(values.max() - values.min()), rel=1e-5)
    few = RangeCandidates(spec)
    few.add_sample(np.ones(3, np.float32))
    assert len(few.list_qparams((None, None))) < 5
    assert RangeCandidates(spec).list_qparams((None, None)) == {}
    with pytest.raises(CalibrationError):
        few.add_sample(np.array([np.nan], np.float32))


def test_a_range_must_be_better_by_more_than_chance() -> None:
    assert choose_candidate({"now": 1.0, "a": 0.85, "b": 0.9}, "now") == "now"
    assert choose_candidate({"now": 1.0, "a": 0.7, "b": 0.6}, "now") == "b"
