"""A plan for TensorRT that says what TensorRT cannot do is refused, by the name of the site."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.errors import PlanError
from onnxq.plan import Plan, SitePlan, from_json, to_json
from onnxq.sites import Role
from onnxq.spec import FLOAT8, PerChannel, QParams, QuantSpec
from tests.pipeline.models import images, residual

CONFIG = load_config("trt-int8")
Change = Callable[[SitePlan], SitePlan]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return onnxq.quantize(residual(), images(), CONFIG).plan


def changed(plan: Plan, role: Role, change: Change) -> tuple[Plan, str]:
    """The plan with its first site of this role changed, and that site's name."""
    first = next(site for site in plan.sites if site.role is role)
    sites = tuple(change(site) if site is first else site for site in plan.sites)
    return plan.with_sites(sites), str(first.site)


def spec(**fields: object) -> Change:
    return lambda site: replace(site, spec=replace(site.spec, storage="", **fields))  # type: ignore[arg-type]


def numbers(scale: object = None, zero: object = None) -> Change:
    def change(site: SitePlan) -> SitePlan:
        old = site.qparams
        made = QParams(
            old.scale if scale is None else np.asarray(scale, np.float32),
            old.zero_point if zero is None else np.full(old.zero_point.shape, zero, np.int32),
        )
        return replace(site, qparams=made)

    return change


FAULTS = [
    (Role.ACTIVATION, spec(symmetric=False), "asymmetric"),
    (Role.ACTIVATION, spec(signed=False), "uint8"),
    (Role.ACTIVATION, spec(bits=16), "16-bit"),
    (Role.ACTIVATION, spec(granularity=PerChannel(1)), "per channel"),
    (Role.WEIGHT, spec(symmetric=False), "asymmetric"),
    (Role.WEIGHT, spec(signed=False), "uint8"),
    (Role.ACTIVATION, numbers(zero=3), "zero point is 3"),
    (Role.WEIGHT, numbers(zero=-1), "zero point is -1"),
    (Role.ACTIVATION, numbers(scale=[0.1]), "shape [1]"),
    (Role.ACTIVATION, numbers(scale=0.0), "scale is 0"),
    (Role.WEIGHT, numbers(scale=[-1.0] * 32), "negative"),
]


@pytest.mark.parametrize(("role", "change", "cause"), FAULTS)
def test_the_site_is_named(plan: Plan, role: Role, change: Change, cause: str) -> None:
    wrong, site = changed(plan, role, change)
    with pytest.raises(PlanError) as caught:
        onnxq.apply(residual(), wrong)
    assert caught.value.subject == site
    assert cause in caught.value.cause
    assert caught.value.fix


@pytest.mark.parametrize(
    ("dynamic", "clip", "cause"),
    [
        (False, (-1.0, 1.0), "has its range"),
        (True, (0.5, 1.0), "does not hold 0"),
        (True, (0.0, None), "a value beside it"),
    ],
)
def test_a_clip_is_for_scales_of_each_run_and_holds_0(
    dynamic: bool, clip: tuple[float, float | None], cause: str
) -> None:
    ort = onnxq.make_plan(residual(), images(), "ort-int8")
    usual = QuantSpec(signed=False, symmetric=False, dynamic=dynamic)
    wrong, site = changed(ort, Role.ACTIVATION, lambda one: replace(one, spec=usual, clip=clip))
    with pytest.raises(PlanError, match=cause) as found:
        onnxq.apply(residual(), wrong, images())
    assert site in str(found.value)


def test_an_int32_bias_is_refused(plan: Plan) -> None:
    ort = onnxq.quantize(residual(), images(), overrides={"latency": False}).plan
    bias = next(site for site in ort.sites if site.role is Role.BIAS)
    with pytest.raises(PlanError, match="float only"):
        onnxq.apply(residual(), plan.with_sites((*plan.sites, replace(bias, derived=None))))


def test_an_fp8_plan_comes_back_whole_and_is_read_from_the_model() -> None:
    result = onnxq.quantize(residual(), images(), "trt-fp8")
    assert {site.spec.storage for site in result.plan.sites} == {FLOAT8}
    text = to_json(result.plan)
    again = from_json(text)
    assert again == result.plan
    assert to_json(again) == text
    assert onnxq.apply(residual(), again).model == result.model
    pairs = onnxq.inspect(result.model).pairs
    # A tensor that one reader takes in float16 and another in float32 has a DequantizeLinear for each.
    assert {pair.site for pair in pairs} == {site.site for site in result.plan.sites}
    assert {(pair.storage, pair.bits, pair.symmetric, pair.levels) for pair in pairs} == {(FLOAT8, 8, True, None)}
    assert result.model.opset_import[0].version >= 19


def test_the_check_says_what_onnx_runtime_cannot_do_with_fp8() -> None:
    report = onnxq.quantize(
        residual(), images(), "trt-fp8", overrides={"high_precision": "float32", "verify.optimized": True}
    ).report
    assert all(check.sqnr_db[0] > 15 for check in report.checks)
    # From 1.32 on its optimizations take FP8, and compute something else (34 dB worse), which is an alarm.
    assert all(np.isnan(check.sqnr_db[1]) != check.optimized for check in report.checks)
    only = any("optimizations off only" in warning for warning in report.warnings)
    assert only == (not any(check.optimized for check in report.checks))
    assert bool(report.alarms()) != only


def test_mixed_kinds_are_refused_at_the_node() -> None:
    rules = {"rules": [{"role": "weight", "set": {"storage": "int8"}}]}
    result = onnxq.quantize(residual(), images(), load_config("trt-fp8", rules))
    assert not result.plan.sites
    assert all("FP8 by FP8" in refusal.reason for refusal in result.report.refusals)
    assert QuantSpec(storage=FLOAT8).is_float
