"""The plan as a value: look-ups, counts, equality, and the tensor behind each site."""

import math
from dataclasses import replace

import numpy as np
import pytest

from onnxq.errors import PlanError
from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.numerics import bias_qparams, weight_qparams
from onnxq.plan import AttentionChoice, AttentionKind, BiasPlan, Plan, SitePlan, drop_stale, from_json, to_json
from onnxq.plan.contents import CONSTANT_TOLERANCE, Feed, make_feeds, read_sketch, sketch_values
from onnxq.plan.model import Scaling, check_scaling
from onnxq.plan.names import PARTS, is_clipped_part, name_part
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec

SPEC = QuantSpec()
NUMBERS = QParams(np.float32(1), np.int32(0))


def site(name: str, role: Role = Role.ACTIVATION, **fields: object) -> SitePlan:
    return SitePlan(site=TensorId(name), role=role, spec=SPEC, **fields)


def plan(*sites: SitePlan, **fields: object) -> Plan:
    return Plan(target="ort", model="m", topology="t", weights="w", sites=sites, **fields)


def test_sites_are_found_by_identity_existing_ones_too() -> None:
    made = plan(site("x"), site("w", Role.WEIGHT), existing=(site("old"),))
    assert made.site(TensorId("w")).role is Role.WEIGHT
    assert made.site(TensorId("old")) is made.existing[0]
    assert [str(one.site) for one in made.all_sites] == ["old", "x", "w"]
    with pytest.raises(PlanError, match="no such site in the plan") as caught:
        made.site(Edge("n", 1, "If_0.then_branch"))
    assert (caught.value.subject, caught.value.code) == ("If_0.then_branch::n/in1", "Q404")


def test_counts_leave_out_existing_pairs() -> None:
    made = plan(site("x"), site("y"), site("w", Role.WEIGHT), existing=(site("old"),))
    assert made.by_role() == {"activation": 2, "weight": 1}
    assert plan().by_role() == {}


def test_calibrated_once_every_site_has_numbers() -> None:
    assert plan().calibrated
    half = plan(site("x", qparams=NUMBERS), site("y"))
    assert not half.calibrated
    assert half.with_sites(half.sites[:1]).calibrated


@pytest.mark.parametrize("name", ["x", "onnx::MatMul_12", "a::b::c"])
@pytest.mark.parametrize("scope", ["", "If_0.then_branch", "me::Block/If_1.else_branch"])
def test_the_tensor_of_a_site_keeps_its_colons(name: str, scope: str) -> None:
    tensor = TensorId(name, scope)
    edge = SitePlan(site=Edge("n", 1, scope), role=Role.WEIGHT, spec=SPEC, tensor=tensor)
    assert from_json(to_json(plan(edge))).sites[0].quantized_tensor == tensor
    assert SitePlan(site=tensor, role=Role.WEIGHT, spec=SPEC).quantized_tensor == tensor


def test_an_input_without_a_tensor_is_a_fault_of_the_plan() -> None:
    with pytest.raises(PlanError, match="does not name its tensor"):
        _ = SitePlan(site=Edge("n", 1), role=Role.WEIGHT, spec=SPEC).quantized_tensor


def test_equality_looks_into_arrays() -> None:
    values = np.arange(4, dtype=np.int8)
    weight = site("w", Role.WEIGHT, values=values)
    assert weight == site("w", Role.WEIGHT, values=values.copy())
    assert weight != site("w", Role.WEIGHT, values=values[::-1])
    assert weight != site("w", Role.WEIGHT, values=values.astype(np.int16))
    assert weight != site("w", Role.WEIGHT)
    assert weight != "w"
    bias = BiasPlan(edge=Edge("n", 2), values=np.zeros(2, np.float32))
    assert bias == replace(bias, values=np.zeros(2, np.float32))
    assert bias != replace(bias, values=np.ones(2, np.float32))
    assert bias != 3
    assert {weight, site("w", Role.WEIGHT)} == {weight, site("w", Role.WEIGHT)}


def test_attention_counts_as_quantized_only_where_it_was_tried_and_kept() -> None:
    tried = AttentionChoice(kind=AttentionKind.QUANTIZED, float_db=30.0, quantized_db=29.5, samples=2)
    assert not plan().quantizes_attention
    assert plan(attention=tried).quantizes_attention
    assert not plan(attention=replace(tried, kind=AttentionKind.FLOAT)).quantizes_attention


FACTORS = {
    "cross_layer_equalization": ([1.0, 2.0], True), "smoothquant": ([0.5], True),
    "bias_absorption": ([-1.0, 0.0], True), "cross_layer_equalization 0": ([0.0], False),
    "smoothquant below 0": ([-1.0], False), "bias_absorption NaN": ([np.nan], False),
    "cross_layer_equalization of two rows": ([[1.0], [2.0]], False), "smoothquant inf": ([np.inf], False),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FACTORS))
def test_factors_are_a_row_of_numbers_that_a_pass_computes(name: str) -> None:
    factors, legal = FACTORS[name]
    made = Scaling(name=name.split()[0], tensor=TensorId("x"), factors=np.asarray(factors, np.float32), anchor="a1")
    if legal:
        assert check_scaling(made) is made
        assert from_json(to_json(plan(scalings=(made,)))).scalings == (made,)
        return
    with pytest.raises(ValueError, match="the factors of x must be a row of finite numbers"):
        check_scaling(made)


# ---- Names of a pair's parts: of its site, apart from each other, as docs and other rooms spell them.


def test_nodes_are_called_after_their_operator() -> None:
    assert name_part(TensorId("x"), "q_node") == f"x/{QUANTIZE}" == "x/QuantizeLinear"
    assert name_part(Edge("conv", 1), "dq_node") == f"conv/in1/{DEQUANTIZE}" == "conv/in1/DequantizeLinear"
    assert is_clipped_part(name_part(TensorId("x"), "clipped"))
    assert name_part(TensorId("onnx::MatMul_12"), "scale") == "onnx::MatMul_12/scale"
    # Names of nodes are unique over the whole model, and tensors are looked up from the inside out.
    assert name_part(TensorId("x", "If_0.then_branch"), "scale") == "x/scale"
    assert name_part(Edge("n", 1, "If_0.then_branch"), "scale") == "n/in1/scale"


def test_no_two_parts_have_one_name() -> None:
    assert len({name_part(TensorId("x"), name) for name in PARTS}) == len(PARTS)


# ---- Sketches of tensors: equal for a tensor turned and reshaped, different for another, and the same after JSON.

VALUES = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)


def test_turned_and_reshaped() -> None:
    first, other = sketch_values(VALUES), sketch_values(VALUES.transpose(2, 0, 1).reshape(12, 5))
    assert first.measure_distance(other) < 1e-12
    assert first.is_alike(sketch_values(VALUES * (1 + 1e-5)))
    assert not first.is_alike(sketch_values(VALUES * 1.01))
    assert not first.is_alike(sketch_values(-VALUES))
    assert first.measure_distance(sketch_values(VALUES[1:])) == math.inf


@pytest.mark.parametrize(("special", "usual"), [(math.nan, 0), (-math.inf, -1e4), (math.inf, 1e4), (-1e35, -1e30)])
def test_special_values_count_as_numbers(special: float, usual: float) -> None:
    assert sketch_values(np.array([1, special, 2])) == sketch_values(np.array([1, usual, 2]))


def test_constants_must_agree_more() -> None:
    first, other = (sketch_values(values, constant=True) for values in (VALUES, VALUES * (1 + 5 * CONSTANT_TOLERANCE)))
    assert not first.is_alike(other)
    assert first.is_alike(sketch_values(VALUES * (1 + 5 * CONSTANT_TOLERANCE)))


def test_text_and_back() -> None:
    for constant in (False, True):
        sketch = sketch_values(VALUES, constant=constant)
        assert str(read_sketch(str(sketch))) == str(sketch)
        assert sketch.is_alike(read_sketch(str(sketch)))
    with pytest.raises(ValueError, match="five finite figures"):
        read_sketch("3 1 2")


def test_infinite_values_and_none() -> None:
    assert sketch_values(np.array([-np.inf, 0.0])).lowest == -1e4
    assert sketch_values(np.zeros(0)).size == 0
    assert sketch_values(np.zeros(3)).measure_distance(sketch_values(np.zeros(3))) == 0


def test_feeds_are_seeded_and_within_bounds() -> None:
    feeds = {"x": Feed("float32", (2, 3)), "ids": Feed("int64", (50,), 0, 7), "on": Feed("bool", (4,), 1, 2)}
    one, two = make_feeds(feeds), make_feeds(feeds)
    assert all(np.array_equal(one[name], two[name]) for name in feeds)
    assert set(one["ids"].tolist()) == set(range(7))
    assert one["on"].all()
    assert [one[name].dtype.name for name in feeds] == ["float32", "int64", "bool"]


# ---- Numbers that an edit of the plan has outdated are removed, with a reason; all others stay.

X, W, B = TensorId("x"), TensorId("w"), TensorId("b")
INT8 = QuantSpec()
CHANNELS = QuantSpec(granularity=PerChannel(0))
WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def stated(weight_spec: QuantSpec = CHANNELS) -> Plan:
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
    made = stated()
    assert drop_stale(made) == (made, {})


def test_another_width_of_a_weight_takes_its_numbers_and_its_values() -> None:
    found, reasons = drop_stale(edit(stated(), W, spec=replace(CHANNELS, bits=4)))
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
    assert drop_stale(edit(stated(), W, spec=replace(CHANNELS, storage="int16")))[1] == {}


def test_an_activation_without_a_scale_takes_the_biases_with_it() -> None:
    found, reasons = drop_stale(edit(stated(), X, qparams=None))
    assert found.site(B).qparams is None
    assert reasons == {}


def test_numbers_that_a_person_wrote_stay_with_whatever_spec() -> None:
    own = QParams(np.float32(0.3), np.int32(0))
    found, reasons = drop_stale(edit(stated(), X, spec=replace(INT8, bits=4), qparams=own))
    assert found.site(X).qparams == own
    assert X not in reasons


def test_a_bias_that_is_no_longer_the_product_is_removed_with_a_reason() -> None:
    found, reasons = drop_stale(edit(stated(), X, qparams=QParams(np.float32(0.3), np.int32(0))))
    assert found.site(B).qparams is None
    assert reasons == {B: "its scale was not that of its input times that of its weight"}


@pytest.mark.parametrize(("old", "new"), [(CHANNELS, INT8), (INT8, CHANNELS)])
def test_a_bias_follows_the_granularity_of_its_weight(old: QuantSpec, new: QuantSpec) -> None:
    found, reasons = drop_stale(edit(stated(old), W, spec=new))
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
