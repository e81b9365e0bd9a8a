"""Ranges chosen by the error behind the operator that reads them: what decides, what is left alone."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.config import Config, Rule, TensorConfig
from onnxq.data import load_data
from onnxq.errors import CalibrationError
from onnxq.graph import GraphIndex
from onnxq.numerics import qparams_from_range
from onnxq.observers import create_observer
from onnxq.observers.histogram import find_candidates
from onnxq.passes import ranges
from onnxq.passes.base import Stage, run_stage
from onnxq.passes.journal import Outcome
from onnxq.passes.judging import Evaluator
from onnxq.passes.ranges import ChosenRanges, choose_candidate, choose_ranges
from onnxq.passes.state import FloatState
from onnxq.plan import Plan
from onnxq.progress import silent
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from tests.passes.context import make_context, place
from tests.passes.kit import parse
from tests.passes.rounding.kit import ALL, calibrated
from tests.pipeline.models import images, list_accounts, quantize, residual

MINMAX = Config(rules=ALL)


def linear(outlier: float) -> onnx.ModelProto:
    """A MatMul whose weights for channel 0 are this large."""
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    weight[0] = outlier * np.sign(weight[0])
    text = "g (float[N, 64, 4] x, int64[N, 64] attention_mask) => (float[N, 64, 6] y) { y = MatMul(x, w) }"
    return parse(text, w=weight)


def tokens(count: int, *, seed: int = 0, padding: float = 1.0) -> dict[str, np.ndarray]:
    """Channel 0 is a hundred times as large as the others, in two samples; the last half of each sample is padding."""
    x = np.random.default_rng(seed).standard_normal((count, 64, 4)).astype(np.float32)
    x[[0, 5], 0, 0] = 100.0
    x[:, 32:] *= padding
    mask = np.ones((count, 64), np.int64)
    mask[:, 32:] = 0
    return {"x": x, "attention_mask": mask}


Samples = list[dict[str, np.ndarray]]


def choose(state: FloatState, plan: Plan, samples: Samples, held: int = 4) -> ChosenRanges:
    """The ranges chosen on samples of which the first ones are held back."""
    return choose_ranges(state.model, plan, samples[held:], samples[:held], progress=silent)


def deaf() -> onnx.ModelProto:
    """`residual` whose first convolution does not hear channel 0."""
    proto = residual()
    held = next(tensor for tensor in proto.graph.initializer if tensor.name == "w0")
    weight = numpy_helper.to_array(held).copy()
    weight[:, 0] = 0.0
    held.CopyFrom(numpy_helper.from_array(weight, "w0"))
    return proto


def picked(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Plan, Plan, dict[str, str]]:
    prepared, plan, samples = calibrated(proto, feeds, MINMAX)
    done = choose(prepared, plan, samples)
    return plan, done.plan, {str(site): name for site, name in done.taken.items()}


def scale(plan: Plan, name: str) -> float:
    return next(float(s.qparams.scale) for s in plan.sites if s.site == TensorId(name) and s.role is Role.ACTIVATION)


def test_what_a_range_would_cut_off_is_judged_wherever_it_is() -> None:
    # The only loud sample is neither held back nor one of the dozen that are looked at again.
    feeds = tokens(44)
    feeds["x"][[0, 5], 0, 0] = 1.0
    assert 9 - 4 not in np.linspace(0, 39, 12).astype(int)
    feeds["x"][9, 0, 0] = 100.0
    before, after, taken = picked(linear(1.0), feeds)
    assert not taken
    assert scale(after, "x") == scale(before, "x") > 0.3


@pytest.mark.parametrize(
    ("attributes", "rows"),
    [("<kernel_shape = [3, 3]>", 8), ("<kernel_shape = [3, 3], dilations = [13, 1]>", 39), ("", 48)],
)
def test_a_band_of_a_large_map_says_as_much(attributes: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 4, 3, 3)).astype(np.float32)
    # The outlier is heard as loudly as rounding.
    weight[:, 0] = 0.2 * np.sign(weight[:, 0])
    text = f"g (float[N, 4, 48, 32] x) => (float[N, 6, H, W] y) {{ y = Conv {attributes} (x, w) }}"
    maps = np.random.default_rng(1).standard_normal((24, 4, 48, 32)).astype(np.float32)
    maps[[6, 9], 0, 20, 7] = 40.0
    taken = picked(parse(text, w=weight), {"x": maps})[2]
    run, judged = ranges.Session.run, set()
    monkeypatch.setattr(
        ranges.Session, "run", lambda *a: judged.update(v.shape[2] for k, v in a[1].items() if k == "value") or run(*a)
    )
    monkeypatch.setattr(ranges, "_POSITIONS", 256)
    assert picked(parse(text, w=weight), {"x": maps})[2] == taken
    # Those with the outlier are judged as a whole.
    assert judged == {rows, 48}


def test_the_outputs_are_judged_on_samples_of_the_calibration_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    real = Evaluator.score
    monkeypatch.setattr(
        Evaluator, "score", lambda self, *a, **b: counts.append(len(self.samples)) or real(self, *a, **b)
    )
    feeds = tokens(16)
    feeds["x"][:, 0, 0] = 100.0
    state, plan, _ = calibrated(linear(1e-6), feeds, MINMAX)
    ctx = make_context(*load_data(feeds, GraphIndex(state.model).inputs).split(4, 0))
    run_stage(ranges.RANGES, Stage.REFINE, ctx, place(state, plan))
    assert counts == [4 + 8, 4 + 8]


@pytest.mark.parametrize(
    ("heard", "padding", "cut"),
    [
        pytest.param(0.0, 1.0, True, id="that no weight hears"),
        pytest.param(1.0, 1.0, False, id="that matters"),
        pytest.param(1.0, 1e3, True, id="of padding, which is not looked at"),
    ],
)
def test_an_outlier_is_cut_off_where_it_does_not_matter(heard: float, padding: float, cut: bool) -> None:
    before, after, taken = picked(linear(heard), tokens(400, padding=padding))
    assert heard or taken["x"] != "minmax"
    factor = scale(after, "x") / scale(before, "x")
    assert factor < 0.2 if cut else factor > 0.99


@pytest.mark.parametrize(("score", "kept"), [("Sigmoid", True), ("Tanh", False)])
def test_the_few_logits_that_detect_something_are_not_cut_off(score: str, kept: bool) -> None:
    """A YOLO's heads are joined and scored; what the error of a head does not show, its scores do."""
    text = f"""g (float[N, 1, 256, 256] x) => (float[N, 2, 256, 256] y) {{
        head = Conv(x, w) other = Conv(x, v) heads = Concat <axis=1>(head, other) y = {score}(heads) }}"""
    x = np.random.default_rng(0).normal(-1, 0.3, (12, 1, 256, 256)).astype(np.float32)
    x[5, 0, 0, 0] = 2.0
    _, _, taken = picked(parse(text, w=np.ones_like(x[:1, :, :1, :1]), v=np.ones_like(x[:1, :, :1, :1])), {"x": x})
    assert taken.keys() == ({"x"} if kept else {"x", "head", "other", "heads"})


def test_what_follows_from_a_range_follows_it() -> None:
    feeds = images(48)
    feeds["x"][[10, 20], 0, 0, 0] = 40.0
    done = choose(*calibrated(deaf(), feeds, MINMAX), held=8)
    assert done.taken
    numbers = {site.site: site.qparams for site in done.plan.sites}
    biases = [site for site in done.plan.sites if site.derived is not None]
    assert any(site.derived[0] in done.taken for site in biases)
    for site in biases:
        x, w, found = (numbers[one] for one in (*site.derived, site.site))
        np.testing.assert_allclose(found.scale, x.scale * w.scale, rtol=1e-6)


def test_groups_keep_one_scale_and_the_same_samples_give_the_same_plan() -> None:
    prepared, plan, samples = calibrated(residual(), images(24), MINMAX)
    sites = [site for site in plan.sites if site.role is Role.ACTIVATION][:2]
    joined = replace(
        plan, sites=tuple(replace(s, group="g", qparams=sites[0].qparams) if s in sites else s for s in plan.sites)
    )
    runs = [choose(prepared, joined, samples) for _ in range(2)]
    assert not {site.site for site in sites} & set(runs[0].taken)
    assert runs[0].plan == runs[1].plan


def test_in_a_run_it_is_told_skipped_and_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MINMAX.model_copy(
        update={"effort": "balanced", "skip": ("cross_layer_equalization", "smoothquant", "rounding", "promotion")}
    )
    feeds = images(48)
    feeds["x"][[10, 20], 0, 0, 0] = 40.0

    def list_lines(data: object = feeds, **overrides: object) -> list[str]:
        return list_accounts(quantize(deaf(), data, config, **overrides), "ranges")

    line = list_lines()[0]
    assert "in a trial" in line
    assert re.search(r"in place of the observer minmax at \w+.*: less noise behind the operators", line)
    assert "`skip: [ranges]` keeps the observer's" in line
    assert list_lines(skip=[*config.skip, "ranges"]) == []
    assert list_lines(effort="fast") == []
    assert list_lines(None) == []
    scores = iter((20.0, 19.0))
    monkeypatch.setattr(Evaluator, "score", lambda *_, **__: next(scores))
    state, plan, _ = calibrated(deaf(), feeds, MINMAX)
    ctx = make_context(load_data(feeds, GraphIndex(state.model).inputs))
    assert run_stage(ranges.RANGES, Stage.REFINE, ctx, place(state, plan)).plan is plan
    assert [report.outcome for report in ctx.journal] == [Outcome.WORSE]


def test_a_range_that_a_rule_gives_stays() -> None:
    rule = Rule.model_validate({"node": "*", "role": "activation", "set": {"range": [-90.0, 110.0]}})
    prepared, plan, samples = calibrated(linear(1.0), tokens(24), Config(rules=(rule, *ALL)))
    assert not choose(prepared, plan, samples).taken
    # Nor do other values come where it was given for these.
    result = quantize(residual(), images(24), Config(rules=(rule, *ALL)), effort="balanced")
    passes = ("rotation", "cross_layer_equalization", "bias_absorption", "smoothquant", "ranges")
    assert [bool(list_accounts(result, name)) for name in passes] == [False, True, False, False, True]


def test_weights_alone_have_no_ranges_to_choose() -> None:
    config = Config(mode="weight-only", rules=ALL, weights=TensorConfig(granularity="channel"))
    prepared, plan, samples = calibrated(linear(1.0), tokens(8), config)
    assert choose(prepared, plan, samples).plan == plan


# ---- Candidates for a range, and when another is better.


def test_candidates_are_those_of_the_observers_without_repeats() -> None:
    spec = QuantSpec(signed=False, symmetric=False)
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)

    def find(*samples: np.ndarray, step: float = 0.0) -> dict[str, QParams]:
        return find_candidates(samples, spec, (None, None), step)

    found = find(values[:20_000], values[20_000:])
    assert set(found) == {"minmax", "percentile 99.999", "percentile 99.99", "mse", "entropy"}
    for name, one in (("mse", ObserverSpec("mse")), ("entropy", ObserverSpec("entropy"))):
        alone = create_observer(one, spec)
        alone.update(values)
        assert float(found[name].scale) == float(qparams_from_range(*alone.range(), spec).scale)
    wide = float(found["minmax"].scale) * 255
    assert wide == pytest.approx(float(values.max() - values.min()), rel=1e-5)
    # A step that is hardly finer takes too little noise away to be tried, and how fine it is to be differs.
    for factor, names in ((0.93, {"mse"}), (0.85, {"mse", "minmax"}), (0.65, {"mse", "minmax", "entropy"})):
        tried = {
            name
            for name, qparams in found.items()
            if name in find(values, step=float(qparams.scale / np.float32(factor)))
        }
        assert tried & {"mse", "minmax", "entropy"} == names
    assert len(find(np.ones(3, np.float32))) < 5
    assert find() == {}
    with pytest.raises(CalibrationError):
        find(np.array([np.nan], np.float32))


def test_a_range_must_be_better_by_more_than_chance() -> None:
    assert choose_candidate({"now": 1.0, "a": 0.85, "b": 0.9}, "now") == "now"
    assert choose_candidate({"now": 1.0, "a": 0.7, "b": 0.6}, "now") == "b"


# ---- Ranges of tensors that few positions show are widened; those of many, of bounded and of shared tensors are not.

RNG = np.random.default_rng(1)
POOLED = """g (float[N,32,4,4] x) => (float[N,4] y) {
    c = Conv(x, w0) p = GlobalAveragePool(c) f = Flatten(p) y = Gemm(f, w1)
}"""
WEIGHTS = {
    "w0": (RNG.standard_normal((32, 32, 1, 1)) / 5).astype(np.float32),
    "w1": RNG.standard_normal((32, 4)).astype(np.float32),
    "wide": RNG.standard_normal((512, 4)).astype(np.float32),
}
POOLING = ("Conv", "GlobalAveragePool")


def quantize_pooled(
    count: int, ops: tuple[str, ...] = POOLING, text: str = POOLED, skip: tuple[str, ...] = (), **asked: Any
) -> tuple[Plan, float]:
    """The plan with these operators for so many samples, and how far p reaches in them."""
    x = np.random.default_rng(0).standard_normal((count, 32, 4, 4)).astype(np.float32)
    rules = tuple(Rule(op=op, set={"quantize": True}) for op in ops)
    config = Config(rules=rules, effort=asked.pop("effort", "fast"), skip=("cross_layer_equalization", *skip))
    p = np.einsum("nchw,oc->nohw", x, WEIGHTS["w0"][:, :, 0, 0]).mean((2, 3))
    return quantize(parse(text, **WEIGHTS), {"x": x}, config, holdout=0, **asked).plan, float(p.max() - p.min())


# With up to 64 samples a request that is met with room to spare widens all ranges by a tenth.
@pytest.mark.parametrize(("count", "factor"), [(32, 1.25 * 1.1), (128, 1.0)])
@pytest.mark.parametrize("ops", [POOLING, (*POOLING, "Gemm")])
def test_ranges_of_few_positions_reach_further(count: int, factor: float, ops: tuple[str, ...]) -> None:
    plan, reach = quantize_pooled(count, ops, min_sqnr=1.0)
    assert 255 * scale(plan, "p") == pytest.approx(factor * reach, rel=1e-3)
    # A tensor of a group has the scale of the others.
    scales = {float(site.qparams.scale) for site in plan.sites if site.group == "p" and site.qparams is not None}
    assert len(scales) <= 1


@pytest.mark.parametrize(
    ("effort", "skip", "factor"), [("fast", (), 1.0), ("balanced", ("ranges",), 1.0), ("balanced", (), 1.25)]
)
def test_ranges_are_those_of_samples_unless_searched(effort: str, skip: tuple[str, ...], factor: float) -> None:
    plan, reach = quantize_pooled(32, effort=effort, skip=skip)
    assert 255 * scale(plan, "p") == pytest.approx(factor * reach, rel=1e-3)


def test_ranges_of_many_positions_stay() -> None:
    few, many = (quantize_pooled(32, ops, min_sqnr=1.0)[0] for ops in (POOLING, ("Conv",)))
    assert scale(few, "c") == pytest.approx(scale(many, "c"))


def test_a_sigmoid_reaches_no_further() -> None:
    text = POOLED.replace("y = Gemm(f, w1)", "s = Sigmoid(f) y = Gemm(s, w1)")
    plan, _ = quantize_pooled(32, (*POOLING, "Sigmoid", "Gemm"), text, min_sqnr=1.0)
    widened = {str(site.site): "widened" in site.qparams.origin for site in plan.sites if site.role is Role.ACTIVATION}
    assert widened == {"x": False, "c": False, "p": True, "s": False}


# A map of 16 positions, each a value of a vector behind a Flatten, and what computes each value of it.
@pytest.mark.parametrize("nodes", ["s = Sigmoid(c) f = Flatten(s)", "s = Flatten(c) f = Relu(s)", "f = Flatten(c)"])
def test_a_map_that_is_flattened_has_as_many_positions_as_before(nodes: str) -> None:
    text = f"g (float[N,32,4,4] x) => (float[N,4] y) {{ c = Conv(x, w0) {nodes} y = Gemm(f, wide) }}"
    plan, _ = quantize_pooled(32, ("Gemm",), text, min_sqnr=1.0)
    widened = {str(site.site): "widened" in site.qparams.origin for site in plan.sites if site.role is Role.ACTIVATION}
    assert widened == {"f": False}
