"""Numbers that an edit of the plan has outdated are removed, with a reason; all others stay."""

from dataclasses import replace

import numpy as np
import pytest

from onnxq.errors import PlanError
from onnxq.numerics import bias_qparams, weight_qparams
from onnxq.plan import Plan, SitePlan, drop_stale
from onnxq.plan.reading import is_stale
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec

X, W, B = TensorId("x"), TensorId("w"), TensorId("b")
INT8 = QuantSpec()
CHANNELS = QuantSpec(granularity=PerChannel(0))
WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def plan(weight_spec: QuantSpec = CHANNELS) -> Plan:
    """A calibrated layer: activation, weight, and the bias that derives from both."""
    x = QParams(np.float32(0.1), np.int32(0), computed_for=INT8.levels)
    w = weight_qparams(WEIGHT, weight_spec)
    grain = PerChannel(0) if isinstance(weight_spec.granularity, PerChannel) else PerTensor()
    return Plan(
        target="ort", model="m", topology="t", weights="w",
        sites=(
            SitePlan(site=X, role=Role.ACTIVATION, spec=INT8, qparams=x),
            SitePlan(site=W, role=Role.WEIGHT, spec=weight_spec, qparams=w, values=np.zeros((3, 4), np.int8)),
            SitePlan(
                site=B, role=Role.BIAS, spec=QuantSpec(bits=32, granularity=grain), derived=(X, W),
                qparams=bias_qparams(x, w, 3),
            ),
        ),
    )  # fmt: skip


def edit(made: Plan, site: TensorId, **changes: object) -> Plan:
    return made.with_sites(tuple(replace(one, **changes) if one.site == site else one for one in made.sites))


def test_a_fresh_plan_loses_nothing() -> None:
    made = plan()
    assert drop_stale(made) == (made, {})
    assert not any(is_stale(site) for site in made.sites)


def test_another_width_of_a_weight_takes_its_numbers_and_its_values() -> None:
    found, reasons = drop_stale(edit(plan(), W, spec=replace(CHANNELS, bits=4)))
    assert found.site(W).qparams is None
    assert found.site(W).values is None
    assert found.site(B).qparams is None
    assert found.site(X).qparams is not None
    assert list(reasons) == [W]
    assert reasons[W] == (
        "its scale was computed for 8 bits signed symmetric per channel 0, "
        "and the plan says 4 bits signed symmetric per channel 0"
    )


def test_another_container_of_the_same_width_is_no_change() -> None:
    made = edit(plan(), W, spec=replace(CHANNELS, storage="int16"))
    assert drop_stale(made)[1] == {}


def test_an_activation_without_a_scale_takes_the_biases_with_it() -> None:
    found, reasons = drop_stale(edit(plan(), X, qparams=None))
    assert found.site(B).qparams is None
    assert reasons == {}


def test_numbers_that_a_person_wrote_stay_with_whatever_spec() -> None:
    own = QParams(np.float32(0.3), np.int32(0))
    made = edit(plan(), X, spec=replace(INT8, bits=4), qparams=own)
    found, reasons = drop_stale(made)
    assert found.site(X).qparams == own
    assert X not in reasons


def test_a_bias_that_is_no_longer_the_product_is_removed_with_a_reason() -> None:
    own = QParams(np.float32(0.3), np.int32(0))
    found, reasons = drop_stale(edit(plan(), X, qparams=own))
    assert found.site(B).qparams is None
    assert reasons == {B: "its scale was not that of its input times that of its weight"}


@pytest.mark.parametrize(("old", "new"), [(CHANNELS, INT8), (INT8, CHANNELS)])
def test_a_bias_follows_the_granularity_of_its_weight(old: QuantSpec, new: QuantSpec) -> None:
    found, reasons = drop_stale(edit(plan(old), W, spec=new))
    wanted = PerChannel(0) if new is CHANNELS else PerTensor()
    assert found.site(B).spec.granularity == wanted
    assert found.site(B).qparams is None
    assert list(reasons) == [W]


def shared(first: QParams | None, second: QParams | None, *specs: QuantSpec) -> Plan:
    one, two = specs or (INT8, INT8)
    edge = Edge("n", 1)
    return Plan(
        target="ort", model="m", topology="t", weights="w",
        sites=(
            SitePlan(site=X, role=Role.ACTIVATION, spec=one, qparams=first, group="g"),
            SitePlan(site=edge, role=Role.ACTIVATION, spec=two, qparams=second, group="g", tensor=TensorId("y")),
        ),
    )  # fmt: skip


def test_sites_that_share_a_scale_must_agree() -> None:
    half, third = (QParams(np.float32(s), np.int32(0)) for s in (0.5, 0.25))
    assert drop_stale(shared(half, half))[1] == {}
    assert drop_stale(shared(half, None))[1] == {}
    with pytest.raises(PlanError, match="their numbers differ") as caught:
        drop_stale(shared(half, third))
    assert caught.value.subject == "n/in1"
    with pytest.raises(PlanError, match="their numbers differ"):
        drop_stale(shared(half, QParams(np.float32(0.5), np.int32(3))))
    with pytest.raises(PlanError, match="quantized differently: 4 bits signed symmetric here"):
        drop_stale(shared(None, None, INT8, replace(INT8, bits=4)))
