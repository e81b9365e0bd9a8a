"""Sites whose scale a pass changed, in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onnxq.passes.scales import MEASURED, list_replaced, name_observer
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, QParams, QuantSpec

MSE = ObserverSpec("mse")
SHARE = ObserverSpec("percentile", (("percentile", 99.9),))


def site(name: str, scale: float | None, role: Role = Role.ACTIVATION, observer: ObserverSpec = MSE) -> SitePlan:
    held = None if scale is None else QParams(np.array(scale, np.float32), np.array(0, np.int32))
    return SitePlan(site=TensorId(name), role=role, spec=QuantSpec(), qparams=held, observer=observer)


def plan(*sites: SitePlan) -> Plan:
    return Plan(target="ort", model="", topology="", weights="", sites=sites)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param([site("a", 1.0)], [site("a", 1.0)], "", id="as it was"),
        pytest.param(
            [site("a", 1.0)], [site("a", 2.0)], "in place of the observer mse at a: because", id="another scale"
        ),
        pytest.param([site("a", 1.0, Role.OUTPUT)], [site("a", 2.0, Role.OUTPUT)],
                     "in place of the observer mse at a: because", id="of an output"),
        pytest.param([site("a", 1.0, Role.WEIGHT)], [site("a", 2.0, Role.WEIGHT)], "", id="of a weight"),
        pytest.param([site("a", None)], [site("a", 2.0)], "", id="none before"),
        pytest.param([site("a", 1.0)], [site("a", None)], "", id="none after"),
        pytest.param([], [site("a", 2.0)], "", id="a new site"),
        pytest.param([site("a", 1.0)], [], "", id="a site that went"),
        pytest.param(
            [site("a", 1.0), site("b", 1.0, observer=SHARE), site("c", 1.0)],
            [site("a", 2.0), site("b", 2.0, observer=SHARE), site("c", 2.0)],
            "in place of the observer mse at a, c, of percentile (percentile 99.9) at b: because",
            id="by the observer",
        ),
        pytest.param(
            [site(name, 1.0) for name in "abcdef"],
            [site(name, 2.0) for name in "abcdef"],
            "in place of the observer mse at a, b, c, d and 2 more: because",
            id="four by name",
        ),
    ],
)  # fmt: skip
def test_replaced_scales_are_listed(before, after, told):
    assert list_replaced(plan(*before), plan(*after), MEASURED, "because") == told


def test_roles_are_those_asked_for():
    before, after = plan(site("w", 1.0, Role.WEIGHT)), plan(site("w", 2.0, Role.WEIGHT))
    assert "at w" in list_replaced(before, after, (Role.WEIGHT,), "because")


def test_a_zero_point_alone_is_no_other_scale():
    before = plan(site("a", 1.0))
    (held,) = before.sites
    moved = replace(held, qparams=QParams(np.array(1.0, np.float32), np.array(3, np.int32)))
    assert list_replaced(before, plan(moved), MEASURED, "because") == ""


def test_observers_are_named_with_their_options():
    assert name_observer(MSE) == "mse"
    two = ObserverSpec("percentile", (("bins", 2048), ("percentile", 99.9)))
    assert name_observer(two) == "percentile (bins 2048, percentile 99.9)"
