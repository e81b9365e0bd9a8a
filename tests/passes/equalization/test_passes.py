"""Scaling channels in the whole run: it saves what rounding to one scale destroys, and gives way where it harms."""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.config import Config, DataConfig, TensorConfig
from onnxq.data import load_data
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, ModelLike, attach_weights, infer_shapes
from onnxq.graph.values import decode_tensor
from onnxq.passes.base import EqualizeContext
from onnxq.passes.equalization import cross_layer, passes
from onnxq.passes.equalization.passes import check_equivalent, gains_by_rotation, score_equalized, score_rotated
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.state import FloatState
from onnxq.plan import Plan, Rotation, from_json, to_json
from onnxq.progress import Progress
from onnxq.sites import Role
from tests.passes.context import make_context
from tests.passes.equalization.decoders import HD, KV, D, H, make_decoder, make_feeds
from tests.passes.kit import infer, make_state, parse
from tests.pipeline import models
from tests.planner.kit import FORCE, draft

F = np.float32
BALANCED = models.EVERYTHING.model_copy(update={"effort": "balanced", "skip": ("rounding",)})
# Layers alone: a pair on what the Mul reads would keep the outliers.
PLAIN = models.add_rule(Config(effort="fast"), op="MatMul", set={"quantize": True})
SMOOTH = PLAIN.model_copy(update={"effort": "balanced", "skip": ("rounding",)})
LAYERS = """g (float[N,16,64] x, int64[N,16] attention_mask) => (float[N,16,64] y, float[N,16,64] z) {
    n = LayerNormalization(x, scale, shift) h = MatMul(n, w1) r = Relu(h) y = MatMul(r, w2) z = Tanh(n)
}"""


def imbalanced() -> onnx.ModelProto:
    """`residual` with channels between its convolutions that differ a thousandfold, and the same function."""
    proto = models.residual()
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    s = np.geomspace(0.03, 30, 32).astype(F)
    columns = 1 / s[:, None, None]
    for name, factor in {"w0": s[:, None, None, None], "b0": s, "w1": columns, "w2": columns}.items():
        held[name].CopyFrom(numpy_helper.from_array((numpy_helper.to_array(held[name]) * factor).astype(F), name))
    return proto


def outliers() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Two layers behind a LayerNormalization with outlier channels that a residual reads too, and samples."""
    rng = np.random.default_rng(0)
    scale = np.ones(64, F)
    scale[[5, 40]] = 80
    held = {"scale": scale, "shift": rng.standard_normal(64) / 4}
    held |= {"w1": rng.standard_normal((64, 256)) / 8 / scale[:, None], "w2": rng.standard_normal((256, 64)) / 16}
    proto = parse(LAYERS, **{name: np.asarray(value, F) for name, value in held.items()})
    mask = np.ones((16, 16), np.int64)
    mask[:, 12:] = 0
    return proto, {"x": rng.standard_normal((16, 16, 64)).astype(F), "attention_mask": mask}


class Run(NamedTuple):
    """A model and its samples, quantized by a configuration."""

    proto: onnx.ModelProto
    samples: dict[str, np.ndarray]
    config: Config
    done: onnxq.Result


def run(proto: onnx.ModelProto, samples: dict[str, np.ndarray], config: Config, **update: Any) -> onnxq.Result:
    return models.quantize(proto, samples, config.model_copy(update=update))


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    cases = {
        "cross_layer_equalization": (imbalanced(), models.images(), BALANCED),
        "smoothquant": (*outliers(), SMOOTH),
    }
    return {name: Run(*case, run(*case)) for name, case in cases.items()}


@pytest.mark.parametrize(("name", "gain"), [("cross_layer_equalization", 6), ("smoothquant", 3)])
def test_scaling_saves_what_a_scale_destroys_and_plans_repeat_it(runs: dict[str, Run], name: str, gain: float) -> None:
    proto, samples, config, done = runs[name]
    assert {one.name for one in done.plan.scalings} == {name}
    assert models.list_accounts(done, name)
    assert [node.op_type for node in done.model.graph.node].count("Mul") == (name == "smoothquant")
    plain = run(proto, samples, config, skip=("rounding", name))
    assert name not in {one.name for one in plain.plan.scalings}
    assert not models.list_accounts(plain, name)
    assert models.find_worst_db(done) > models.find_worst_db(plain) + gain
    assert models.find_worst_db(done) > models.find_worst_db(run(proto, samples, config, effort="fast")) + gain
    again = from_json(to_json(done.plan))
    assert again == done.plan
    assert models.to_bytes(onnxq.apply(proto, again)) == models.to_bytes(done)


def test_a_network_that_is_good_is_left_as_it_is() -> None:
    done = run(models.residual(), models.images(), BALANCED)
    assert not done.plan.scalings
    # No Mul comes between integer kernels.
    assert "Mul" not in {node.op_type for node in done.model.graph.node}


def joined() -> onnx.ModelProto:
    text = "g (float[N,8,8,8] x) => (float[N,8,8,8] y) { a = Conv(x, v) b = Conv(x, w) s = Add(a, b) y = Conv(s, u) }"
    rng, s = np.random.default_rng(0), np.geomspace(0.03, 30, 8)[:, None, None, None]
    weights = {name: rng.standard_normal((8, 8, 1, 1)) for name in "vwu"}
    factors = {"v": s, "w": s, "u": 1 / s[:, 0]}
    return parse(text, **{name: (value * factors[name]).astype(F) for name, value in weights.items()})


@pytest.mark.parametrize(("count", "equalized"), [(8, False), (32, True)])
def test_channels_are_equalized_by_samples_that_show_them(count: int, equalized: bool) -> None:
    feeds = np.random.default_rng(1).standard_normal((count, 8, 8, 8)).astype(F)
    done = run(joined(), {"x": feeds}, BALANCED)
    assert (passes.CROSS_LAYER in {scaling.name for scaling in done.plan.scalings}) is equalized


def test_weights_of_few_bits_do_not_hide_what_scaling_is_worth() -> None:
    # Rounded to nearest, 4-bit weights leave 15 dB whatever the channels look like.
    few = {"weights": TensorConfig(bits=4, granularity="channel"), "skip": ("rounding", "ranges")}
    done = run(imbalanced(), models.images(), BALANCED, **few)
    (line,) = models.list_accounts(done, "cross_layer_equalization")
    before, after = map(float, re.search(r"(\S+) to (\S+) dB", line).groups())  # type: ignore[union-attr]
    assert after > before + 10
    assert after > 30


def test_other_names_are_found_by_structure(runs: dict[str, Run]) -> None:
    proto, done = outliers()[0], runs["smoothquant"].done
    for node in proto.graph.node:
        node.input[:] = [f"other_{name}" if name in ("n", "h", "r") else name for name in node.input]
        node.output[:] = [f"other_{name}" if name in ("n", "h", "r") else name for name in node.output]
    assert len(onnxq.apply(proto, done.plan).plan.sites) == len(done.plan.sites)


def test_scalings_of_another_network_are_refused(runs: dict[str, Run]) -> None:
    proto, _, _, done = runs["smoothquant"]
    with pytest.raises(PlanError, match="not in this model"):
        onnxq.apply(models.residual(), done.plan)
    text = to_json(done.plan).replace('"pass": "smoothquant"', '"pass": "smoothed"')
    with pytest.raises(PlanError, match="no such pass"):
        onnxq.apply(proto, from_json(text))
    with pytest.raises(PlanError, match="above 0"):
        from_json(to_json(done.plan).replace('"factors": [\n', '"factors": [\n -1.0,\n'))


def test_factors_that_harm_are_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(proto: onnx.ModelProto, *_: object) -> object:
        found = scaled_factors(proto)
        return {tensor: np.geomspace(1e-3, 1e3, s.size).astype(F) for tensor, s in found.items()}

    scaled_factors = cross_layer.compute_factors
    monkeypatch.setattr(cross_layer, "compute_factors", uneven)
    monkeypatch.setattr(passes, "_GOOD_DB", 99.0)
    skip = ("rounding", "cross_layer_equalization", "bias_absorption", "smoothquant")
    plain = run(models.residual(), models.images(), BALANCED, skip=skip)
    done = run(models.residual(), models.images(), BALANCED)
    assert not done.plan.scalings
    assert any("cross_layer_equalization: rolled back: " in line for line in done.report.accounts)
    assert models.find_worst_db(done) == models.find_worst_db(plain)


def test_a_rewrite_that_changes_the_function_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: ModelLike, factors: object) -> onnx.ModelProto:
        copy = onnx.ModelProto.FromString(attach_weights(model).SerializeToString())
        tensor = copy.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(decode_tensor(tensor) * F(1.1), tensor.name))
        return copy

    monkeypatch.setitem(passes._WRITERS, passes.CROSS_LAYER, wrong)
    done = run(imbalanced(), models.images(), BALANCED)
    assert not done.plan.scalings
    assert "cross_layer_equalization: rolled back: it changed the float outputs, max" in done.report.accounts[0]


# Weights alone in few bits, by nearest rounding.
FEW = Config(mode="weight-only", weights=TensorConfig(bits=4, granularity="channel"), skip=("rounding", "smoothquant"))


def decoder(outlier: float) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A decoder whose norms make some channels larger, as those of language models do, and samples of it."""
    scale = np.ones(D)
    scale[[3, 10]] = outlier
    rng, held = np.random.default_rng(0), {f"n{k}g": scale for k in range(3)}
    for name, columns in {"wq": H * HD, "wk": KV * HD, "wv": KV * HD, "wg": 32, "wu": 32, "wh": 40}.items():
        held[name] = rng.standard_normal((D, columns)) / scale[:, None] / 5
    return make_decoder(**held), {"ids": rng.integers(0, 40, (6, 2, 7))}


def test_rotation_saves_weights_behind_outlier_channels_and_a_plan_repeats_it() -> None:
    proto, samples = decoder(1 / 40)
    done = run(proto, samples, FEW)
    plain = run(proto, samples, FEW, skip=(*FEW.skip, "rotation"))
    assert models.find_worst_db(done) > models.find_worst_db(plain) + 3
    assert models.list_accounts(done, "rotation")
    assert not plain.plan.scalings
    rotations = [(one.name, str(one.tensor), one.size) for one in done.plan.scalings if isinstance(one, Rotation)]
    assert rotations == [("rotation", "x0", D), ("rotation", "v0", HD)]
    again = from_json(to_json(done.plan))
    assert again == done.plan
    assert models.to_bytes(onnxq.apply(proto, again)) == models.to_bytes(done)
    # Exported again, under other names.
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"other_{name}" if name in ("x0", "x1", "v0", "v", "n0") else name for name in names]
        node.name = f"other_{node.name}"
    renamed = onnxq.apply(proto, again).model
    assert infer(renamed, make_feeds())[0].tobytes() == infer(done.model, make_feeds())[0].tobytes()


def test_rotation_is_not_kept_where_it_brings_nothing() -> None:
    proto, samples = decoder(1)
    done = run(proto, samples, FEW)
    assert not done.plan.scalings
    (line,) = models.list_accounts(done, "rotation")
    assert "nothing to gain" in line or "rolled back" in line


# ---- An equalized model is compared with the float one, and judged quantized; where either cannot be, it is given up.

TEXT = "g (float[1,4,8,8] x) => (float[1,4,8,8] y) { c = Conv(x, w) r = Relu(c) y = Conv(r, v) }"
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal((4, 4, 1, 1)).astype(np.float32) for name in "wv"}
KEPT = PassReport("made up", changed=("c: scaled",))


def model(**changed: np.ndarray) -> onnx.ModelProto:
    return infer_shapes(parse(TEXT, **{**WEIGHTS, **changed}))


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
    return make_state(model(w=w, v=(WEIGHTS["v"] * np.reshape(back, (1, -1, 1, 1))).astype(np.float32)))


FACTORS = np.array([0.3, 7.0, 1.0, 100.0])


@pytest.mark.parametrize(("back", "outcome"), [(1.0, Outcome.KEPT), (1.01, Outcome.NOT_EQUIVALENT)])
def test_the_same_function_is_kept_with_the_difference_that_rounding_makes(ctx, back, outcome):
    before, after = make_state(model()), scaled(FACTORS, back / FACTORS)
    left, report = check_equivalent(ctx, before, after, KEPT)
    kept = outcome is Outcome.KEPT
    assert left is (after if kept else before)
    assert (report.outcome, report.changed) == (outcome, KEPT.changed if kept else ())
    assert 0 < report.difference < 1e-4 if kept else report.difference > 1e-3


def test_an_output_of_zeros_has_no_decibels_and_is_the_same_function(ctx):
    nothing = np.zeros_like(WEIGHTS["v"])
    ctx = ctx.add_reference(model(v=nothing), place)
    before = make_state(model())
    assert check_equivalent(ctx, before, make_state(model(v=nothing)), KEPT)[1].outcome is Outcome.KEPT
    # Rounding may make it another zero.
    tiny = (WEIGHTS["v"] * 1e-9).astype(np.float32)
    assert check_equivalent(ctx, before, make_state(model(v=tiny)), KEPT)[1].outcome is Outcome.KEPT
    assert check_equivalent(ctx, before, make_state(model(v=tiny * 1e4)), KEPT)[1].outcome is Outcome.NOT_EQUIVALENT


def test_the_score_is_of_the_worst_output_and_computed_once(ctx, reference):
    calls = []
    ctx = replace(ctx, place=lambda one, progress: calls.append(one) or place(one, progress))
    one = make_state(reference)
    score = score_equalized(ctx, one)
    assert 20 < score < 80
    # Another state of the same model has that model's score.
    assert score_equalized(ctx, make_state(reference)) == score
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
    assert score_equalized(ctx, make_state(reference)) is None
    # That is remembered, too.
    assert ctx.base.scores[id(reference)] == (reference, None)


@pytest.mark.parametrize(
    ("name", "after", "kept"),
    [(passes.SMOOTHQUANT, 29.8, True), (passes.SMOOTHQUANT, 29.4, False), (passes.CROSS_LAYER, 29.9, False)],
)
def test_what_noise_alone_may_cost_is_kept_of_smoothing(name: str, after: float, kept: bool) -> None:
    assert next(one.trial for one in passes.EQUALIZATION if one.name == name).threshold.allows(30.0, after) == kept


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
    plain, rotated = score_equalized(made, make_state(reference)), score_rotated(made, make_state(reference))
    assert (rotated < plain - 1) is (bits == 3)
