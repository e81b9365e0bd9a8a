"""Promotion: sites to blame leave 8 bits, no more than the wish takes, judged on ranges of other samples."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxq
from onnxq.calibrate import calibrate
from onnxq.cli import cli
from onnxq.commands.results import write_json
from onnxq.config import TensorConfig
from onnxq.data import load_data
from onnxq.errors import ConfigError, DataError
from onnxq.evaluation.compare import compare_models
from onnxq.evaluation.metric import AccuracyRequest
from onnxq.graph import GraphIndex, get_index, name_nodes
from onnxq.numerics import clip_bounds
from onnxq.passes.base import SampledContext
from onnxq.passes.mixed_precision.cross_validation import Fold, split_folds, widen_ranges
from onnxq.passes.mixed_precision.promotion import ROUNDING_AGAIN
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan
from onnxq.progress import silent
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.spec import ObserverSpec
from tests.passes.context import make_context, place
from tests.passes.kit import make_state, parse
from tests.pipeline import models
from tests.pipeline.models import EVERYTHING, ROUGH, images, residual
from tests.planner.kit import FORCE, draft, network

# Everything else than one rough activation may stay.
COARSE = EVERYTHING.model_copy(
    update={"weights": TensorConfig(granularity="channel", bits=3, narrow_range=True), "bias": "float"}
)


def sqnr(model: onnx.ModelProto, seed: int = 7) -> float:
    pair = (Session(residual(), optimize=False), Session(model, optimize=False))
    return compare_models({"": pair}, [{"x": one[None]} for one in images(16, seed)["x"]])[""].worst_db()


CONFIGS = {"rough": ROUGH, "coarse": COARSE, "plain": EVERYTHING}


@cache
def quantize(config: str = "rough", count: int = 48, **wanted: Any) -> onnxq.Result:
    """The network by one of CONFIGS; asked for once, it is there for every test."""
    return models.quantize(residual(), images(count), CONFIGS[config], **wanted)


def names(done: onnxq.Result) -> list[str]:
    return [str(site.site) for site in done.plan.sites]


def test_the_rough_site_is_promoted_and_the_rest_stays() -> None:
    plain, done = quantize(), quantize(min_sqnr=35)
    account = done.report.promotion
    assert account.met
    assert "r" not in names(done)
    assert account.operators < 4
    assert account.operators + account.left == 4
    assert sqnr(plain.model) < 30
    assert sqnr(done.model) > 35
    step = account.steps[0]
    assert step.before < 30 < step.after
    # Of all samples, each with the ranges of others.
    assert account.samples == 48
    assert 35 < account.value - account.spread < account.value < sqnr(done.model) + 3
    promoted = {name for one in account.steps for name in one.nodes}
    assert {refusal.subject for refusal in done.plan.left_float if refusal.rule == "promoted"} <= promoted
    document = json.loads(write_json(done.report))["promotion"]
    assert (document["met"], document["steps"][0]["to"]) == (True, "float")
    # The plan repeats it without data.
    assert onnxq.apply(residual(), done.plan).model.SerializeToString() == done.model.SerializeToString()


def test_a_wish_that_holds_changes_nothing() -> None:
    account = quantize(min_sqnr=5).report.promotion
    assert account.met
    assert account.steps == ()
    assert names(quantize(min_sqnr=5)) == names(quantize())


@pytest.mark.parametrize("wanted", [20.0, 24.0, 30.0, 40.0])
def test_more_is_promoted_for_more_and_the_verdict_is_of_unseen_samples(wanted: float) -> None:
    done = quantize("coarse", min_sqnr=wanted)
    account = done.report.promotion
    assert account.met == (min(min(one.sqnr_db) for one in done.report.checks) >= wanted)
    assert [one.after for one in account.steps] == sorted(one.after for one in account.steps)
    if wanted < 25:
        # Of a segment that was promoted together each operator has to be needed: others are given back.
        assert account.met
        assert 0 < account.operators < 4
    if wanted == 30:
        again = quantize.__wrapped__("coarse", min_sqnr=wanted)
        assert again.model.SerializeToString() == done.model.SerializeToString()


@pytest.mark.parametrize("wanted", [60, 500])
def test_a_file_that_is_all_float_never_holds(wanted: float) -> None:
    """Nothing is promoted then: the float model is there already."""
    done = quantize("coarse", min_sqnr=wanted)
    account = done.report.promotion
    assert not account.met
    assert (account.steps, account.left) == ((), 4)
    assert account.note.startswith("only the float model is sure to hold this: with 3 of 4 operators in float")
    assert names(done) == names(quantize("coarse"))


def test_nothing_to_quantize_holds_no_wish() -> None:
    alone = parse("g (float[N,3,8,8] x) => (float[N,3,8,8] y) { y = Relu(x) }")
    done = onnxq.quantize(alone, {"x": images(24)["x"][:, :3]}, overrides={"latency": False, "min_sqnr": 20})
    account = done.report.promotion
    assert done.plan.sites == ()
    assert not account.met
    assert account.note == "nothing is quantized: only the float model holds this"


def test_a_metric_that_only_float_holds_is_not_met() -> None:
    def count_floats(model: object) -> float:
        proto = onnx.load(model.path)  # type: ignore[attr-defined]
        return -float(any(node.op_type == "QuantizeLinear" for node in proto.graph.node))

    account = quantize("coarse", metric=count_floats).report.promotion
    assert not account.met
    assert (account.steps, account.value, account.float_value) == ((), -1.0, 0.0)
    assert account.note == "only the float model holds this"


@pytest.mark.parametrize(("count", "headroom"), [(32, 1.1), (80, 1.0)])
def test_ranges_get_headroom_where_samples_are_few_and_the_wish_leaves_decibels(count: int, headroom: float) -> None:
    done = quantize("plain", count, min_sqnr=20)
    assert done.report.promotion.met
    assert done.report.promotion.headroom == headroom
    (site,) = (site for site in done.plan.sites if str(site.site) == "x")
    assert clip_bounds(site.qparams, site.spec)[1] == pytest.approx(headroom * images(count)["x"].max(), rel=0.01)
    assert onnxq.apply(residual(), done.plan).model.SerializeToString() == done.model.SerializeToString()


@pytest.mark.parametrize(
    ("wanted", "after", "keeps"),
    [(40.0, 38.4, False), (40.0, 40.5, True), (43.0, 42.0, True), (43.0, 41.0, False), (None, 41.0, False)],
)
def test_weights_rounded_anew_cost_no_wish(wanted: float | None, after: float, keeps: bool) -> None:
    """Of 41.6 dB on all samples, which may be less than a wish that is out of reach."""
    model = name_nodes(residual())
    samples = load_data(images(2), get_index(model).inputs)
    ctx, state = replace(make_context(samples), request=AccuracyRequest(min_sqnr=wanted)), make_state(model)
    assert ROUNDING_AGAIN.trial.allows(ctx, state, state, 41.6, after) is keeps


def test_uint16_keeps_the_operators_and_widens_the_pair() -> None:
    done = quantize(min_sqnr=35, promote_to="uint16")
    account = done.report.promotion
    assert account.met
    sites = {str(site.site): site for site in done.plan.sites}
    assert sites["r"].spec.storage == "uint16"
    assert sites["w1"].spec.bits == 8
    assert all(one.to == "uint16" for one in account.steps)
    assert sqnr(done.model) > 35
    onnx.checker.check_model(done.model)


def test_uint16_is_refused_where_the_target_has_none() -> None:
    overrides = {"latency": False, "effort": "fast", "min_sqnr": 60, "promote_to": "uint16"}
    with pytest.raises(ConfigError, match="no 16-bit activations"):
        onnxq.quantize(residual(), images(24), "trt-int8", overrides=overrides)


def test_trt_goes_to_float() -> None:
    done = onnxq.quantize(residual(), images(48), "trt-int8", overrides={"latency": False, "min_sqnr": 55})
    account = done.report.promotion
    assert account.steps
    assert account.met
    index = GraphIndex(done.model)
    for name in (name for one in account.steps for name in one.nodes):
        assert not any("DequantizeLinear" in text for text in index.find_node(name).inputs)


class TestMetric:
    """A metric of one's own: agreement of the largest of ten with float's."""

    FEEDS = images(64, seed=11)["x"]

    def test_by_function(self) -> None:
        wanted, seen = Session(residual(), optimize=False).run({"x": self.FEEDS})["y"].argmax(1), []

        def agree(model: object) -> float:
            seen.append(model)
            got = model({"x": self.FEEDS})["y"]  # type: ignore[operator]
            same = model.session.run(None, {"x": self.FEEDS})[0]  # type: ignore[attr-defined]
            assert np.array_equal(got, same)
            assert onnx.load(model.path).graph.output[0].name == "y"  # type: ignore[attr-defined]
            return float((got.argmax(1) == wanted).mean())

        account = quantize("coarse", metric=agree, max_drop=0.02).report.promotion
        assert account.met
        assert account.float_value == 1.0
        assert account.value >= 0.98
        assert 0 < account.operators < 4
        assert len(seen) < 8

    def test_the_fewest_steps_are_taken(self) -> None:
        """Of all files that the metric was asked about, and that hold, the one with most pairs is taken."""
        counts: set[int] = set()

        def sites(model: object) -> float:
            proto = onnx.load(model.path)  # type: ignore[attr-defined]
            left = sum(node.op_type == "QuantizeLinear" for node in proto.graph.node)
            counts.add(left)
            return -float(left)

        account = quantize("coarse", metric=sites, max_drop=6).report.promotion
        assert account.met
        assert max(counts) > 6
        # The float model's, of the first file that holds, and of the one with most.
        _, few, most = sorted(left for left in counts if left <= 6)
        assert -account.value == most > few

    def test_from_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "m.py").write_text("def one(model):\n    return 1.0\ndef bad(model):\n    return 'x'\n")
        assert quantize(metric=f"{tmp_path / 'm.py'}:one").report.promotion.met
        with pytest.raises(DataError, match="gave x"):
            quantize(metric=f"{tmp_path / 'm.py'}:bad")
        with pytest.raises(DataError, match="no such function"):
            quantize(metric=f"{tmp_path / 'm.py'}:ones")

    def test_a_mistake_in_the_function_shows_before_anything_is_quantized(self) -> None:
        begun = []

        @contextmanager
        def progress(title: str, total: int = 0) -> Iterator[object]:
            begun.append(title)
            with silent(title, total) as task:
                yield task

        overrides = {"latency": False, "metric": lambda _: np.nan}
        with pytest.raises(DataError, match="gave nan"):
            onnxq.quantize(residual(), images(24), ROUGH, overrides=overrides, progress=progress)
        assert "<lambda> on the float model" in begun[-1]
        assert not any("calibrating" in title or "promot" in title for title in begun)

    def test_what_does_not_go_together(self) -> None:
        for wanted in ({"max_drop": 1}, {"metric": len, "min_sqnr": 3.0}, {"metric": "m.py"}, {"promote_to": "int4"}):
            with pytest.raises(ConfigError):
                quantize(**wanted)
        with pytest.raises(ConfigError, match="no samples"):
            onnxq.quantize(residual(), None, ROUGH, overrides={"min_sqnr": 10})


def lost(depth: int = 6) -> onnx.ModelProto:
    """A chain of convolutions, in front a tensor that 8 bits cannot hold: one channel is far larger than the others."""
    rng = np.random.default_rng(3)
    weights = {f"w{k}": rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17 for k in range(depth)}
    weights["w0"][0] *= 3e4
    weights["w1"][:, 0] /= 3e4
    lines = " ".join(f"t{k + 1} = Conv<pads=[1,1,1,1]>(t{k}, w{k})" for k in range(depth))
    return parse(f"g (float[N,32,8,8] t0) => (float[N,32,8,8] t{depth}) {{ {lines} }}", **weights)


@cache
def unhappy(depth: int, **update: Any) -> onnxq.Result:
    return models.quantize(lost(depth), {"t0": images(48)["x"]}, BALANCED.model_copy(update=update))


BALANCED = EVERYTHING.model_copy(update={"effort": "balanced", "skip": ("cross_layer_equalization", "rounding")})


def test_what_is_lost_is_promoted_without_being_asked() -> None:
    plain = unhappy(6, skip=(*BALANCED.skip, "promotion"))
    assert plain.report.promotion is None
    assert min(plain.report.checks[0].sqnr_db) < 10
    done = unhappy(6)
    account = done.report.promotion
    assert account.met
    assert min(done.report.checks[0].sqnr_db) > 10
    assert {name for one in account.steps for name in one.nodes} == {"t1/Conv", "t2/Conv"}


def test_where_half_of_the_operators_would_not_do_nothing_is_and_the_blame_is_told() -> None:
    done = unhappy(3)
    account = done.report.promotion
    assert not account.met
    assert account.steps == ()
    assert "half of the operators in float would not do; most is lost at t2/Conv, t1/Conv" in account.note
    assert len(done.plan.sites) == len(unhappy(3, skip=(*BALANCED.skip, "promotion")).plan.sites)


@pytest.mark.parametrize(
    ("method", "answer", "note"),
    [("is_expired", True, "the budget ran out"), ("_propose_keys", None, "only the float model holds this")],
)
def test_where_no_promotion_was_tried_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, method: str, answer: object, note: str
) -> None:
    search = "onnxq.passes.mixed_precision.promotion_search.PromotionSearch"
    monkeypatch.setattr(f"{search}.{method}", lambda *_, **__: answer)
    assert unhappy.__wrapped__(3).report.promotion.note == note


@pytest.mark.parametrize(("figure", "value"), [("_MOST_MICROSECONDS", 0.0), ("_VALUE_MICROSECONDS", 1e9)])
def test_a_network_that_is_slow_is_searched_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, figure: str, value: float
) -> None:
    monkeypatch.setattr(f"onnxq.passes.mixed_precision.promotion_search.{figure}", value)
    account = unhappy.__wrapped__(6).report.promotion
    assert (account.met, account.steps) == (False, ())
    assert "`min_sqnr=10`" in account.note
    assert models.quantize(lost(), {"t0": images(48)["x"]}, BALANCED, min_sqnr=10).report.promotion.met


def test_nothing_is_promoted_unasked_where_it_is_good_or_fast_or_coarse_by_wish() -> None:
    good = EVERYTHING.model_copy(update={"effort": "balanced"})
    assert onnxq.quantize(residual(), images(24), good, overrides={"latency": False}).report.promotion is None
    assert unhappy(6, effort="fast").report.promotion is None
    assert unhappy(6, weights=TensorConfig(granularity="channel", bits=2, narrow_range=True)).report.promotion is None


@pytest.fixture
def work(tmp_path: Path) -> Path:
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **images(48))
    (tmp_path / "c.yaml").write_text(
        "rules:\n  - {tensor: r, role: activation, set: {quantize: true, bits: 2}}\n"
        "  - {op: '*', set: {quantize: true}}\n"
    )
    (tmp_path / "m.py").write_text("calls = []\ndef falls(model):\n    calls.append(1)\n    return -len(calls)\n")
    return tmp_path


def run(work: Path, *args: object) -> object:
    wanted = ["quantize", work / "m.onnx", "--data", work / "d.npz", "--config", work / "c.yaml", "--no-latency"]
    return CliRunner().invoke(cli, [str(arg) for arg in (*wanted, "--force", *args)])


def test_the_command_and_its_exit_codes(work: Path) -> None:
    done = run(work, "--min-sqnr", 35)
    assert done.exit_code == 0, done.stderr
    assert "at least 35 dB at every output: holds" in done.stdout
    assert "keeps" not in done.stderr
    unmet = run(work, "--metric", f"{work / 'm.py'}:falls", "--max-drop", 0)
    assert unmet.exit_code == 4
    assert "does NOT hold" in unmet.stderr
    assert "error[Q709]" in unmet.stderr
    assert (work / "m.q.onnx").exists()
    assert run(work, "--max-drop", "1%").exit_code == 1


# The values themselves are the input's range, which the order of the samples does not show.
TOPS = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0]


@pytest.fixture(scope="module")
def run_cross_validation() -> tuple[SampledContext, PlacedState]:
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


def test_every_sample_is_in_one_fold_on_ranges_of_the_others(run_cross_validation) -> None:
    ctx, state = run_cross_validation
    folds = split_folds(ctx, state)
    assert len(folds) == 4
    assert sorted(value for fold in folds for value in own(fold)) == sorted(TOPS)
    for fold in folds:
        others = max(value for value in TOPS if value not in own(fold))
        assert top(fold.narrow_ranges(state.model, state.plan)) == pytest.approx(others, rel=0.01)


def test_weights_and_ranges_that_clip_already_stay(run_cross_validation) -> None:
    ctx, state = run_cross_validation
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


def test_ranges_of_all_values_widen_and_those_that_clip_by_intention_do_not(run_cross_validation) -> None:
    ctx, state = run_cross_validation
    wider = widen_ranges(state.model, state.plan, 1.1)
    assert top(wider) == pytest.approx(1.1 * 9.0, rel=0.01)
    fold = max(split_folds(ctx, state), key=lambda fold: max(own(fold)))
    assert top(fold.narrow_ranges(state.model, wider)) == pytest.approx(1.1 * 6.0, rel=0.01)
    percentile = state.plan.with_sites(
        tuple(replace(site, observer=ObserverSpec("percentile")) for site in state.plan.sites)
    )
    assert widen_ranges(state.model, percentile, 1.1) is percentile


def test_without_ranges_of_samples_there_is_one_fold(run_cross_validation) -> None:
    ctx, state = run_cross_validation
    weights = replace(state, plan=state.plan.with_sites(
        tuple(site for site in state.plan.sites if site.role is Role.WEIGHT)))  # fmt: skip
    (fold,) = split_folds(ctx, weights)
    assert sorted(own(fold)) == sorted(TOPS)
    assert fold.narrow_ranges(state.model, weights.plan) is weights.plan
