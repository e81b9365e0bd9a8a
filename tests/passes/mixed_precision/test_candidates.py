"""What may be promoted, and the plan that comes of it: on a chain of convolutions, without a run of the model."""

from dataclasses import replace

import numpy as np
import pytest

import onnxq
from onnxq.evaluation.metric import UINT16
from onnxq.passes.mixed_precision.candidates import Ways, find_owners, list_quantized_ops
from onnxq.plan import BiasPlan, Plan, SitePlan
from onnxq.planner import OnnxPlacement
from onnxq.sites import Edge, Role
from onnxq.spec import QParams
from tests.passes.kit import parse
from tests.planner.kit import FORCE, draft, network

TEXT = """g (float[1,8,12,12] x) => (float[1,8,12,12] y) {
    a = Conv<pads=[1,1,1,1]>(x, w0) r = Relu(a) b = Conv<pads=[1,1,1,1]>(r, w1) q = Relu(b)
    c = Conv<pads=[1,1,1,1]>(q, w2) s = Add(c, r)
    y = Conv<pads=[1,1,1,1]>(s, w3) }"""
WEIGHT = (8, 8, 3, 3)


def numbered(plan: Plan) -> Plan:
    """The plan with a scale of its own at every site, as if it had been calibrated."""
    zero = np.array(0, np.int32)
    sites = (replace(s, qparams=QParams(np.array(k + 1, np.float32), zero)) for k, s in enumerate(plan.sites))
    return replace(plan, sites=tuple(sites))


@pytest.fixture(scope="module")
def problem() -> OnnxPlacement:
    return draft(network(TEXT, w0=WEIGHT, w1=WEIGHT, w2=WEIGHT, w3=WEIGHT), FORCE)


@pytest.fixture(scope="module")
def plan(problem) -> Plan:
    return numbered(problem.default())


@pytest.fixture(scope="module")
def floats(problem, plan) -> Ways:
    return Ways(problem, plan)


@pytest.fixture(scope="module")
def wide(problem, plan) -> Ways:
    return Ways(problem, plan, UINT16)


def sites(plan: Plan, *roles: Role) -> dict[str, SitePlan]:
    return {str(site.site): site for site in plan.sites if not roles or site.role in roles}


def test_the_computing_operators_are_those_with_quantized_weights_as_they_run(problem, plan):
    assert list_quantized_ops(problem, plan) == ("a", "b", "c", "y")
    assert list_quantized_ops(problem, replace(plan, sites=())) == ()


def test_an_operator_without_a_weight_computes_in_integers_with_all_its_activations():
    text = "g (float[1,4,8,8] p, float[1,4,8,8] q) => (float[1,4,8,8] y) { y = MatMul(p, q) }"
    problem = draft(network(text), FORCE, preset="trt-int8", attention="quantized")
    plan = problem.default()
    assert list_quantized_ops(problem, plan) == ("y",)
    first = replace(plan, sites=tuple(site for site in plan.sites if "p" in str(site.site)))
    assert len(first.sites) == 1
    assert list_quantized_ops(problem, first) == ()


def test_operators_are_promoted_one_by_one_and_for_uint16_sites(floats, wide):
    assert floats.list_groups() == {name: {name} for name in "abcy"}
    assert wide.list_groups() == {name: {name} for name in "xrqcs"}


def test_sites_that_share_a_scale_are_widened_together(problem, plan):
    grouped = tuple(replace(site, group="g") if str(site.site) in "rc" else site for site in plan.sites)
    groups = Ways(problem, replace(plan, sites=grouped), UINT16).list_groups()
    assert groups == {"x": {"x"}, "c": {"r", "c"}, "q": {"q"}, "s": {"s"}}


@pytest.mark.parametrize("name", ["a", "b", "c", "y"])
def test_an_operator_that_becomes_float_takes_its_weight_along_and_says_why(problem, plan, name):
    floats = Ways(problem, plan, reason="somebody said so")
    assert floats.promote_keys(frozenset()) is plan
    after = floats.promote_keys(frozenset(name))
    assert list_quantized_ops(problem, after) == tuple(one for one in ("a", "b", "c", "y") if one != name)
    assert floats.list_promoted(after) == (name,)
    told = {one.subject: one for one in after.left_float}
    assert (told[name].code, told[name].rule) == ("F106", "promoted")
    assert "somebody said so" in told[name].reason
    # All others keep their numbers.
    before = sites(plan)
    for key, site in sites(after).items():
        if key in before and before[key].spec == site.spec:
            assert site.qparams.scale == before[key].qparams.scale, key


def test_what_was_float_stays_so_for_its_own_reason(problem) -> None:
    """The planner, asked anew, would take it back: it was left float by a pass, and not by the planner."""
    before = numbered(Ways(problem, problem.default(), reason="its own").leave_float(frozenset({"y"})).default())
    ways, keys = Ways(problem, before), frozenset({"a"})
    assert "y" in list_quantized_ops(problem, ways.promote_keys(keys))
    after = ways.promote_steadily(keys)
    assert "y" not in list_quantized_ops(problem, after)
    assert set(list_quantized_ops(problem, after)) < set(list_quantized_ops(problem, before))
    assert {one.subject: one.reason for one in after.left_float}["y"] == "its own"


def test_a_draft_with_operators_left_float_shares_the_ids_of_the_first(floats, problem):
    left = floats.leave_float(frozenset("b"))
    assert left.ids is problem.ids
    assert set(left.refused) - set(problem.refused) == {"b"}
    assert "b" not in problem.refused


def test_a_widened_site_gets_sixteen_bits_and_waits_for_its_numbers(wide, plan):
    assert wide.promote_keys(frozenset()) is plan
    after = wide.promote_keys(frozenset("r"))
    changed = {key for key, site in sites(after).items() if site.spec != sites(plan)[key].spec}
    assert changed == {"r"}
    held = sites(after)["r"]
    assert (held.spec.bits, held.qparams) == (16, None)
    assert held.spec.signed == sites(plan)["r"].spec.signed
    assert after.opset >= 21
    # Who reads it does not compute in eight bits any more.
    assert wide.list_promoted(after) == ("b",)


@pytest.mark.parametrize("values", [None, np.zeros(WEIGHT, np.int8)], ids=["to nearest", "rounded otherwise"])
def test_a_finer_input_gives_a_new_bias_and_a_new_scale_of_the_weight(problem, plan, values):
    """Of a weight that is rounded to nearest: others keep their integers, and their scale."""
    weight = next(site for site in plan.sites if "w0" in str(site.tensor))
    sources = (sites(plan)["x"].site, weight.site)
    derived = SitePlan(site=Edge("a", 2, ""), role=Role.BIAS, spec=weight.spec, derived=sources, qparams=weight.qparams)
    held = tuple(replace(site, values=values) if site is weight else site for site in plan.sites)
    after = sites(Ways(problem, replace(plan, sites=(*held, derived)), UINT16).promote_keys(frozenset(["x"])))
    assert after[str(derived.site)].qparams is None
    assert (after[str(weight.site)].qparams is None) == (values is None)
    assert after[str(weight.site)].values is values
    others = [site for key, site in after.items() if key not in ("x", str(derived.site), str(weight.site))]
    assert all(site.qparams is not None for site in others)


def test_corrected_biases_stay_with_operators_that_stay(problem, plan):
    biases = tuple(BiasPlan(edge=Edge(name, 2, ""), values=np.ones(8, np.float32)) for name in "ab")
    after = Ways(problem, replace(plan, biases=biases)).promote_keys(frozenset("b"))
    assert [bias.edge.node for bias in after.biases] == ["a"]


def test_the_owner_of_a_bias_is_its_node_or_the_matmul_in_front_of_its_add():
    proto = network("g (float[2,4] x) => (float[2,4] y) { m = MatMul(x, w) s = Add(m, b) y = Gemm(s, w, b) }",
                    w=(4, 4), b=(4,))  # fmt: skip
    index = draft(proto).index
    assert find_owners(index, Edge("s", 1, "")) == {"s", "m"}
    assert find_owners(index, Edge("y", 2, "")) == {"y"}


def test_time_and_bytes_weigh_and_what_gains_none_costs_little() -> None:
    text = """g (float[1,32,24,24] x) => (float[1,32,24,24] y) {
        a = Conv<pads=[1,1,1,1]>(x, w0) b = Conv(a, w1) y = Conv<pads=[1,1,1,1]>(b, w2) }"""
    shapes = {"w0": (32, 32, 3, 3), "w1": (32, 32, 1, 1), "w2": (32, 32, 3, 3)}
    for target in ("ort", "trt"):
        problem = draft(network(text, **shapes), FORCE, preset=f"{target}-int8")
        ways = Ways(problem, numbered(problem.default()))
        names = list_quantized_ops(problem, ways.plan)
        assert len(names) == 3
        costs = {name: ways.measure_cost(ways.promote_keys(frozenset([name]))) for name in names}
        # Nine times the work, and the weights, of the one in the middle.
        assert costs[names[1]] < min(costs[names[0]], costs[names[2]])
        assert ways.measure_cost(ways.promote_keys(frozenset(names))) > max(costs.values())
        assert ways.measure_cost(ways.plan) == 0


F = np.float32
RNG = np.random.default_rng(0)
W = (RNG.standard_normal((64, 64)) / 8).astype(F)
CAUSAL = np.triu(np.full((16, 16), -np.inf, F), 1)

BRANCH = """g (float[N,64] x, bool c) => (float[N,64] y) { m = MatMul(x, w)
    b = If(c) <then_branch = t () => (float[N,64] a) { a = Relu(m) },
               else_branch = e () => (float[N,64] d) { k = Sigmoid(m) d = Add(k, m) }> y = MatMul(b, w) }"""
EMPTY = "g (float[N,64] x, float[M,64] z) => (float[N,64] y, float[M,64] n) { y = MatMul(x, w) n = MatMul(z, w) }"
LOG = "g (float[N,64] x) => (float[N,64] y) { m = MatMul(x, w) r = Relu(m) l = Log(r) s = Softmax(l) y = MatMul(s, w) }"
MASKED = """g (float[1,16,64] x, float[16,16] mask) => (float[1,16,64] y) { q = MatMul(x, w)
    t = Transpose<perm = [0,2,1]>(q) s = MatMul(q, t) m = Add(s, mask) p = Softmax(m) c = MatMul(p, q)
    y = MatMul(c, w) }"""


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


@pytest.mark.parametrize(
    ("text", "make", "reason"),
    [
        (BRANCH, lambda: {"x": draw(4, 64), "c": np.array(True)}, "never ran the branch"),
        (EMPTY, lambda: {"x": draw(4, 64), "z": np.zeros((0, 64), F)}, "always empty"),
        (LOG, lambda: {"x": draw(4, 64)}, "holds -inf"),
        (MASKED, lambda: {"x": draw(1, 16, 64) / 4, "mask": CAUSAL}, ""),
    ],
    ids=["branch", "empty", "log", "mask"],
)
def test_operators_without_a_range_stay_float(text, make, reason):
    samples = [make() for _ in range(12)]
    overrides = {"target": "virtual", "effort": "fast", "latency": False}
    result = onnxq.quantize(parse(text, w=W), samples, overrides=overrides)
    assert result.report.pairs
    assert result.plan.calibrated
    told = [refusal.reason for refusal in result.plan.refusals if refusal.code == "R106"]
    assert len(told) == bool(reason)
    assert all(reason in one for one in told)
    assert min(check.sqnr_db[0] for check in result.report.checks) > 25
