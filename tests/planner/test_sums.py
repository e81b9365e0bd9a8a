"""Weights of target ort never overflow the 16-bit sums of CPUs without VNNI, whatever way they came."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.backends import load_config
from onnxq.config import Config, TensorConfig
from onnxq.errors import PlanError
from onnxq.numerics import find_saturating_sums
from onnxq.passes.assembly import build_quantized
from onnxq.pipeline.prepared import load_state
from onnxq.plan import Plan, from_json, to_json
from onnxq.sites import Role
from onnxq.spec import ObserverSpec
from tests.graph.kit import model
from tests.networks import parse_text
from tests.pipeline.models import BALANCED, EVERYTHING, images, quantize, residual, to_bytes

EVERY_KIND = """g (float[N,8,6,6] x) => (float[N,10] y, float[N,7] z) {
    a = Conv <pads=[1,1,1,1]>(x, dense) b = Conv <group=8, pads=[1,1,1,1]>(a, depthwise)
    c = Conv <group=2, pads=[1,1,1,1]>(b, grouped) d = Conv <group=8, pads=[1,1,1,1]>(c, multiplied)
    e = Conv <pads=[1,1,1,1]>(d, down) e2 = Conv <pads=[1,1,1,1]>(e, dense) m = GlobalAveragePool(e2) f = Flatten(m)
    g = MatMul(f, matrix) y = Gemm(g, plain) z = Gemm <transB=1>(g, turned)
}"""
SHAPES = {
    "dense": (8, 8, 3, 3), "depthwise": (8, 1, 3, 3), "grouped": (8, 4, 3, 3), "multiplied": (16, 1, 3, 3),
    "down": (8, 16, 3, 3), "matrix": (8, 9), "plain": (9, 10), "turned": (7, 9),
}  # fmt: skip
ORDERS = {
    "dense": ((0, 2, 3, 1),), "depthwise": (), "grouped": ((0, 2, 3, 1),), "multiplied": ((0, 2, 3, 1),),
    "down": ((0, 2, 3, 1),), "matrix": ((1, 0),), "plain": ((1, 0),), "turned": ((0, 1),),
}  # fmt: skip


def every_kind(seed: int = 0) -> onnx.ModelProto:
    """Every kernel there is; weights of one sign, so that nearly every sum of rounded ones could overflow."""
    rng = np.random.default_rng(seed)
    weights = {
        name: (0.5 + rng.random(shape).astype(np.float32)) / np.prod(shape[1:]) for name, shape in SHAPES.items()
    }
    proto = parse_text(EVERY_KIND, **{name: weight.astype(np.float32) for name, weight in weights.items()})
    onnx.checker.check_model(proto)
    return proto


def samples(count: int = 8) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(3).standard_normal((count, 8, 6, 6)).astype(np.float32)}


def stored(model: onnx.ModelProto) -> Mapping[str, np.ndarray]:
    """The int8 initializers by the name of the weight that they were."""
    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {name.removesuffix("/quantized"): v for name, v in found.items() if v.dtype == np.int8 and v.ndim > 1}


def overflowing(result: onnxq.Result) -> int:
    """Sums that can overflow, counted with the orders that the kernels have, not with those of the plan."""
    held = stored(result.model)
    wanted = {str(site.site) for site in result.plan.sites if site.role is Role.WEIGHT}
    assert len(held) == len(wanted)
    orders = {name: ORDERS[name.partition("/")[0]] for name in held}
    return sum(int(find_saturating_sums(held[name], order).sum()) for name in held for order in orders[name])


def test_which_weights_of_which_kernels() -> None:
    plan = onnxq.make_plan(every_kind(), samples(), EVERYTHING)
    assert {str(site.site): site.sum_orders for site in plan.sites if site.role is Role.WEIGHT} == ORDERS


WEIGHTS = [
    TensorConfig(granularity="channel"),
    TensorConfig(),
    TensorConfig(granularity="channel", observer=ObserverSpec("mse")),
    TensorConfig(scheme="asymmetric", signed=True, granularity="channel"),
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_sum_overflows_but_where_it_may(weights: TensorConfig) -> None:
    asked = EVERYTHING.model_copy(update={"weights": weights})
    for effort in ("fast", "high"):
        assert overflowing(quantize(every_kind(), samples(12), asked, effort=effort)) == 0
    assert overflowing(quantize(every_kind(), samples(12), asked, saturation="allow")) > 100


@pytest.mark.parametrize(
    "update",
    [
        {"mode": "weight-only"},
        {"target": "virtual"},
        {"target": "trt"},
        {"activations": TensorConfig(scheme="asymmetric", signed=False, bits=16)},
        {"weights": TensorConfig(granularity="channel", bits=7)},
        {"weights": TensorConfig(granularity="channel", scheme="asymmetric", signed=False)},
    ],
)
def test_exact_kernels_are_left_alone(update: dict[str, object]) -> None:
    config = Config(**{**dict(load_config("trt-int8") if "trt" in update.values() else EVERYTHING), **update})
    plans = [
        onnxq.make_plan(every_kind(), samples(), config.model_copy(update={"saturation": how}))
        for how in ("avoid", "allow")
    ]
    assert plans[0].sites == plans[1].sites
    assert plans[0].sites
    assert not any(site.sum_orders for site in plans[0].sites)


def test_allowing_it_is_said_in_the_plan_and_in_the_summary() -> None:
    loose = quantize(residual(), images(), saturation="allow")
    assert any("saturation: allow" in line for line in loose.report.warnings)
    assert not any(site.sum_orders for site in loose.plan.sites)
    assert json.loads(to_json(loose.plan))["saturation"] == "allow"
    assert from_json(to_json(loose.plan)) == loose.plan
    with pytest.raises(PlanError, match="'no' is not one of avoid, allow"):
        from_json(to_json(loose.plan).replace('"allow"', '"no"'))
    assert not any("saturation" in line for line in quantize(residual(), images()).report.warnings)


def test_a_weight_with_two_readers_keeps_the_sums_of_both() -> None:
    """The same weight, read by a Conv whose kernel is exact and by one whose kernel is not."""
    text = """g (float[N,4,6,6] x) => (float[N,4,6,6] y) {
        a = Conv <group=4, pads=[1,1,1,1]>(x, w) s = ReduceSum <keepdims=1>(a, one) y = Conv <pads=[1,1,1,1]>(s, w) }"""
    weight = (0.5 + np.random.default_rng(0).random((4, 1, 3, 3))).astype(np.float32)
    feeds = {"x": np.random.default_rng(1).standard_normal((8, 4, 6, 6)).astype(np.float32)}
    found = quantize(model(text, w=weight, one=np.array([1])), feeds, BALANCED)
    (site,) = (site for site in found.plan.sites if site.role is Role.WEIGHT)
    assert len(site.consumers or ()) == 2
    assert site.sum_orders == ((0, 2, 3, 1),)
    (values,) = stored(found.model).values()
    assert not find_saturating_sums(values, (0, 2, 3, 1)).any()


@pytest.fixture(scope="module")
def done() -> onnxq.Result:
    found = quantize(every_kind(), samples(24), BALANCED)
    assert overflowing(found) == 0
    return found


def edited(plan: Plan) -> tuple[Plan, str]:
    """A weight's integers as large as they go."""
    site = next(site for site in plan.sites if str(site.site) == "matrix")
    values = np.full(SHAPES["matrix"], 127, np.int8)
    sites = tuple(replace(one, values=values) if one is site else one for one in plan.sites)
    return replace(plan, sites=sites), str(site.site)


def test_integers_that_somebody_wrote_are_moved_with_a_line(done: onnxq.Result, tmp_path: Path) -> None:
    plan, name = edited(done.plan)
    path = tmp_path / "plan.json"
    path.write_text(to_json(plan))
    again = onnxq.apply(every_kind(), path)
    assert overflowing(again) == 0
    (line,) = (line for line in again.report.warnings if "overflow" in line)
    assert line.startswith(f"{name}: 36 sums in 9 rows")
    # Nothing else gives way: 127 and 127 become 64 and 64.
    assert set(np.unique(stored(again.model)[name])) == {64}


def test_a_plan_that_allows_it_is_carried_out_as_it_is(done: onnxq.Result) -> None:
    plan, name = edited(done.plan)
    again = onnxq.apply(every_kind(), replace(plan, saturation="allow"))
    assert set(np.unique(stored(again.model)[name])) == {127}
    assert not any("would overflow" in line for line in again.report.warnings)


def test_a_plan_from_before_sums_were_known_gives_the_same_file(done: onnxq.Result) -> None:
    plan = replace(done.plan, sites=tuple(replace(site, sum_orders=()) for site in done.plan.sites))
    again = onnxq.apply(every_kind(), plan)
    assert to_bytes(again) == to_bytes(done)
    assert again.plan.sites == done.plan.sites


def test_writing_integers_that_break_the_plan_s_own_word_is_refused(done: onnxq.Result) -> None:
    plan, name = edited(done.plan)
    with pytest.raises(PlanError, match="overflow 16-bit sums") as caught:
        build_quantized(load_state(every_kind(), plan=plan), plan)
    assert caught.value.subject == name
