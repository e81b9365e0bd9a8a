"""A plan fits the same network exported again, whatever its nodes and tensors are called then, and nothing else."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from onnxq.errors import PlanError
from onnxq.graph import compute_fingerprint, get_index
from onnxq.graph.scopes import walk_graphs
from onnxq.plan import BiasPlan, Plan, SitePlan
from onnxq.planner import digest_weights, fit_plan
from onnxq.sites import Edge, Role
from tests.planner.kit import FORCE, MAP, POINT, draft, network, site

TEXT = f"""g ({MAP} x, bool k) => ({MAP} y) {{
    a = Conv(x, w, b) r = Relu(a)
    i = If (k) <then_branch = t () => ({MAP} p) {{ p = Conv(r, v) }},
                else_branch = e () => ({MAP} q) {{ q = Relu(r) }}>
    c = Conv(i, v) s = Add(c, r) y = Conv(s, z)
}}"""


@lru_cache(maxsize=1)
def net() -> onnx.ModelProto:
    return network(TEXT, w=POINT, b=(8,), v=POINT, z=POINT)


@lru_cache(maxsize=1)
def plan() -> Plan:
    return draft(net(), FORCE).default()


def fitted(plan: Plan, proto: onnx.ModelProto, **options: bool) -> Plan:
    return fit_plan(plan, get_index(proto), compute_fingerprint(proto), **options)


def renamed(proto: onnx.ModelProto, seed: int) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with other names for all but its inputs and outputs, its nodes in another order; and the new names."""
    copy, rng = onnx.ModelProto.FromString(proto.SerializeToString()), random.Random(seed)
    kept = {value.name for value in (*copy.graph.input, *copy.graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if name in kept or not name else names.setdefault(name, f"t{rng.randrange(10**6)}_{len(names)}")

    for _, graph in walk_graphs(copy.graph):
        for value in (*graph.value_info, *graph.initializer, *graph.output):
            value.name = new(value.name)
        for node in graph.node:
            node.input[:] = map(new, node.input)
            node.output[:] = map(new, node.output)
            node.name = f"n{rng.randrange(10**6)}_{node.name}"
    nodes = list(copy.graph.node)
    rng.shuffle(nodes)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy, names


def test_the_model_it_was_made_for() -> None:
    assert fitted(plan(), net()) == plan()


@given(st.integers(0, 2**31))
@settings(max_examples=8)
def test_the_same_network_under_other_names(seed: int) -> None:
    again, names = renamed(net(), seed)
    found = fitted(plan(), again)
    wanted = draft(again, FORCE).default()
    assert {site.site for site in found.sites} == {site.site for site in wanted.sites}
    assert {(site.site, site.consumers, site.derived, site.spec) for site in found.sites} == {
        (site.site, site.consumers, site.derived, site.spec) for site in wanted.sites
    }
    assert names.get("r", "r") in {str(site.site) for site in found.sites}


def test_biases_and_float_nodes_go_by_node() -> None:
    bias = BiasPlan(edge=Edge("a", 2), values=np.zeros(8, np.float32))
    held = replace(plan(), biases=(bias,), float_nodes=("p",), nodes={**plan().nodes, "p": plan().nodes["p"]})
    again, _ = renamed(net(), 3)
    found = fitted(held, again)
    index = get_index(again)
    assert index.find_node(found.biases[0].edge.node).op_type == "Conv"
    assert index.find_node(found.biases[0].edge.node).inputs[0] == "x"
    assert index.find_node(found.float_nodes[0]).scope.endswith("then_branch")


def other_weights() -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(net().SerializeToString())
    held = copy.graph.initializer[0]
    held.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(held), held.name))
    return copy


def test_other_weights_are_an_error_unless_they_are_expected() -> None:
    calibrated = replace(plan(), biases=(BiasPlan(edge=Edge("a", 2), values=np.zeros(8, np.float32)),))
    with pytest.raises(PlanError, match="computed from other weights") as caught:
        fitted(calibrated, other_weights())
    assert caught.value.code == "Q402"
    assert "`new_weights=True`" in caught.value.fix
    found = fitted(calibrated, other_weights(), new_weights=True)
    assert found.biases == ()
    assert all(site.qparams is None for site in found.sites if site.role in (Role.WEIGHT, Role.BIAS))
    assert found.weights == compute_fingerprint(other_weights()).weights


def with_site(found: SitePlan) -> Plan:
    return plan().with_sites((*plan().sites, found))


FAULTS = {
    "made otherwise": (with_site(site("a", anchor="0" * 64)), "a", "not in this model", "take `anchor` out of this"),
    "a float node that is not there": (
        replace(plan(), float_nodes=("yy",)), "yy", "this node is in the plan but not in this model", "'y'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("held", "subject", "cause", "fix"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_named(held: Plan, subject: str, cause: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        fitted(held, net())
    assert (caught.value.subject, caught.value.code) == (subject, "Q404")
    assert cause in caught.value.cause
    assert fix in caught.value.fix


def test_a_site_without_an_anchor_goes_by_its_name_alone() -> None:
    bare = plan().with_sites(tuple(replace(one, anchor="") for one in plan().sites))
    assert {one.site for one in fitted(bare, net()).sites} == {one.site for one in plan().sites}


def test_lasting_names_hold_where_the_graph_around_them_changed() -> None:
    """A Neg in front changes the structural id of every tensor behind it, and no name."""
    proto = network(TEXT.replace("a = Conv(x,", "m = Neg(x) a = Conv(m,"), w=POINT, b=(8,), v=POINT, z=POINT)
    kept = tuple(one for one in plan().sites if str(one.site) in ("r", "c", "s", "y"))
    with pytest.raises(PlanError, match="not in this model"):
        fitted(plan().with_sites(kept), proto)
    lasting = replace(plan().with_sites(kept), lasting=True, weights=digest_weights(kept, get_index(net())))
    assert [str(one.site) for one in fitted(lasting, proto).sites] == ["r", "c", "s", "y"]
