"""Sites whose scale a pass changed, in words."""

from dataclasses import replace

import numpy as np
import pytest

from onnxq.passes.journal import MEASURED, list_replaced
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, QParams, QuantSpec

MSE = ObserverSpec("mse")
SHARE = ObserverSpec("percentile", (("bins", 2048), ("percentile", 99.9)))


def site(name: str, scale: float | None, role: Role = Role.ACTIVATION, observer: ObserverSpec = MSE) -> SitePlan:
    held = None if scale is None else QParams(np.array(scale, np.float32), np.array(0, np.int32))
    return SitePlan(site=TensorId(name), role=role, spec=QuantSpec(), qparams=held, observer=observer)


def plan(*sites: SitePlan) -> Plan:
    return Plan(target="ort", model="", topology="", weights="", sites=sites)


ONE, TWO = [site("a", 1.0)], [site("a", 2.0)]
TOLD = "in place of the observer mse at a: because"
MOVED = QParams(np.array(1.0, np.float32), np.array(3, np.int32))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param(ONE, ONE, "", id="as it was"),
        pytest.param(ONE, TWO, TOLD, id="another scale"),
        pytest.param([site("a", 1.0, Role.OUTPUT)], [site("a", 2.0, Role.OUTPUT)], TOLD, id="of an output"),
        pytest.param([site("a", 1.0, Role.WEIGHT)], [site("a", 2.0, Role.WEIGHT)], "", id="of a weight"),
        pytest.param([site("a", None)], TWO, "", id="none before"),
        pytest.param(ONE, [site("a", None)], "", id="none after"),
        pytest.param([], TWO, "", id="a new site"),
        pytest.param(ONE, [], "", id="a site that went"),
        pytest.param(ONE, [replace(ONE[0], qparams=MOVED)], "", id="another zero point alone"),
        pytest.param(
            [*ONE, site("b", 1.0, observer=SHARE), site("c", 1.0)],
            [*TWO, site("b", 2.0, observer=SHARE), site("c", 2.0)],
            "in place of the observer mse at a, c, of percentile (bins 2048, percentile 99.9) at b: because",
            id="by the observer",
        ),
        pytest.param(
            [site(name, 1.0) for name in "abcdef"],
            [site(name, 2.0) for name in "abcdef"],
            "in place of the observer mse at a, b, c, d and 2 more: because",
            id="four by name",
        ),
    ],
)
def test_replaced_scales_are_listed(before, after, told):
    assert list_replaced(plan(*before), plan(*after), MEASURED, "because") == told


def test_roles_are_those_asked_for():
    before, after = plan(site("w", 1.0, Role.WEIGHT)), plan(site("w", 2.0, Role.WEIGHT))
    assert "at w" in list_replaced(before, after, (Role.WEIGHT,), "because")
