"""Targets as data: which rule takes a node, which reason is told, and how specs and tables read."""

from dataclasses import replace
from typing import Any

import onnx
import pytest

from onnxq.backends import (
    BACKENDS,
    Candidate,
    Capability,
    PlacementRule,
    Target,
    find_target,
    list_backends,
    list_runnable,
)
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, NodeRef
from onnxq.sites import LeftFloat, Refusal, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec, describe_spec
from tests.backends.graphs import model

TARGETS = {(backend.name, mode): target for backend in list_backends() for mode, target in backend.modes.items()}
TEXT = """g (float[N,4,8,8] x, float[2] other) => (float[N,4,8,8] y, float[2] z) {
    h = Conv<pads=[1,1,1,1]>(x, w) y = Clip(h, , high) z = Relu(other)
}"""


def graph() -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model(TEXT, weights={"w": (4, 4, 3, 3), "high": ()}))


def candidate(name: str, shapes: dict[TensorId, tuple[int, ...]] | None = None) -> Candidate:
    index = GraphIndex(graph())
    return Candidate(index.find_node(name), index, shapes or {})


def rule(name: str, **fields: Any) -> PlacementRule:
    return PlacementRule(**{"name": name, "ops": ("Conv",), "kernel": "", "why": "", **fields})


def target(*rules: PlacementRule, **fields: Any) -> Target:
    return Target(name="some", rules=rules, capabilities=(), **fields)


def test_a_candidate_tells_what_is_observed_before_what_is_declared() -> None:
    conv, clip = candidate("conv0"), candidate("clip1")
    assert conv.tensor(0) == TensorId("x")
    assert [conv.tensor(2), clip.tensor(1), clip.tensor(3)] == [None] * 3
    assert [conv.is_constant(k) for k in range(3)] == [False, True, False]
    assert (conv.constant(0), conv.constant(7)) == (None, None)
    assert conv.constant(1).shape == (4, 4, 3, 3)  # type: ignore[union-attr]
    # N is known only where a run was observed; its rank is declared.
    assert (conv.shape(0), conv.output_shape(), conv.rank(0)) == (None, None, 4)
    seen = candidate("conv0", {TensorId("x"): (2, 4, 8, 8), TensorId("h"): (2, 4, 8, 8)})
    assert (seen.shape(0), seen.output_shape(), seen.rank(0)) == ((2, 4, 8, 8), (2, 4, 8, 8), 4)
    assert candidate("relu2").shape(0) == (2,)
    assert (clip.rank(1), clip.shape(1)) == (None, None)
    assert (conv.attr("pads", ()), conv.attr("group", 1)) == ((1, 1, 1, 1), 1)


def no(reason: str) -> dict[str, Any]:
    return {"check": lambda _: reason}


def slow(reason: str) -> dict[str, Any]:
    return {"unpaid": lambda _: reason}


@pytest.mark.parametrize(
    ("rules", "taken", "reason"),
    [
        ((rule("a"), rule("b")), "a", None),
        ((rule("a", ops=("Gemm",)), rule("b")), "b", None),
        ((rule("a", **no("not so"), compute=True), rule("b")), "b", None),
        ((), None, None),
        ((rule("a", ops=("Gemm",), **no("not so")),), None, None),
        # Of several reasons the first holds; those of rules that only follow are no news.
        ((rule("a", **no("not so")),), None, None),
        ((rule("a", **no("one"), compute=True), rule("b", **no("two"), compute=True)), None,
         Refusal("conv0", "one", rule="a", code="R102")),
        # A kernel that loses is there, so that reason comes before one against a kernel.
        ((rule("a", **no("one"), compute=True), rule("b", **slow("two")), rule("c", **slow("three"))), None,
         LeftFloat("conv0", "two", "b")),
        ((rule("a", **no("one"), **slow("two")),), None, None),
    ],
)  # fmt: skip
def test_the_first_rule_that_takes_a_node_holds(rules: tuple[PlacementRule, ...], taken: str | None, reason: object):
    found, why = target(*rules).rule_for(candidate("conv0"))
    assert (None if found is None else found.name, why) == (taken, reason)


def test_rules_are_for_operators_of_onnx() -> None:
    proto = graph()
    proto.graph.node[0].domain = "mine"
    index = GraphIndex(proto)
    assert target(rule("a")).rule_for(Candidate(index.find_node("conv0"), index, {})) == (None, None)


@pytest.mark.parametrize(
    ("kind", "reason"), [("double", "its data is not float32, which alone has quantized kernels"), ("int64", None)]
)
def test_rules_are_for_float32(kind: str, reason: str | None) -> None:
    """Integers are shapes and positions, of which no rule need speak."""
    index = GraphIndex(onnx.parser.parse_model(f'''<ir_version: 8, opset_import: ["" : 17]>
        g ({kind}[N,4] x) => ({kind}[N,4] y) {{ [add] y = Add(x, x) }}'''))  # fmt: skip
    taken = target(rule("a", ops=("Add",), data=(0, 1), compute=True)).rule_for(Candidate(index.nodes[0], index, {}))
    assert taken == (None, None if reason is None else Refusal(index.nodes[0].name, reason, rule="a", code="R102"))


def node(op_type: str, domain: str = "") -> NodeRef:
    return replace(candidate("conv0").node, name="n", op_type=op_type, domain=domain)


def test_operators_without_any_kernel() -> None:
    some = target(no_kernel={"LSTM": "none"}, no_gain={"AveragePool": "slow"})
    assert some.without_kernel(node("LSTM")) == Refusal("n", "none", rule="no-kernel", code="R101")
    assert some.without_kernel(node("AveragePool")) == LeftFloat("n", "slow", "no-kernel")
    assert some.without_kernel(node("Conv")) is None
    # Another operator of this name.
    assert some.without_kernel(node("LSTM", domain="com.microsoft")) is None
    custom = some.without_kernel(node("Swell", domain="example.ops"))
    assert isinstance(custom, LeftFloat)
    assert custom.code == "F108"


def test_operators_of_onnx_runtime_say_why_they_stay_float() -> None:
    for engine in (find_target("ort", "static"), find_target("trt", "static")):
        fused = engine.without_kernel(node("FusedMatMul", domain="com.microsoft"))
        assert isinstance(fused, Refusal)
        assert fused.code == "R101"
        for op_type, domain in (("Attention", ""), ("GroupQueryAttention", "com.microsoft")):
            found = engine.without_kernel(node(op_type, domain))
            assert isinstance(found, LeftFloat)
            assert "attention in one node" in found.reason


def weights(**fields: Any) -> Capability:
    return Capability(role=Role.WEIGHT, **fields)


ROWS = (
    weights(ops=("Conv",), bits=(4, 8), storage=("int8",), symmetric=(True,), granularity=(PerTensor, PerChannel)),
    weights(bits=(4,), storage=("int4",), symmetric=(True,), granularity=(PerBlock,), blocks=(16, 32), opset=21),
    weights(bits=(8,), storage=("int8",), granularity=(PerTensor,), warning="slow"),
)


@pytest.mark.parametrize(
    ("spec", "op", "row"),
    [
        (QuantSpec(), "Conv", 0),
        (QuantSpec(granularity=PerChannel(0)), "Conv", 0),
        (QuantSpec(bits=4), "Conv", 0),
        (QuantSpec(), "Gemm", 2),
        (QuantSpec(symmetric=False), "Conv", 2),
        (QuantSpec(granularity=PerChannel(0)), "Gemm", None),
        (QuantSpec(bits=5), "Conv", None),
        (QuantSpec(signed=False), "Conv", None),
        (QuantSpec(bits=4, storage="int4", granularity=PerBlock(0, 32)), "Gemm", 1),
        (QuantSpec(bits=4, storage="int4", granularity=PerBlock(0, 64)), "Gemm", None),
    ],
)
def test_the_first_row_that_accepts_a_spec(spec: QuantSpec, op: str, row: int | None) -> None:
    some = Target(name="some", rules=(), capabilities=ROWS)
    assert some.capability(spec, Role.WEIGHT, op) is (None if row is None else ROWS[row])
    assert some.capability(spec, Role.ACTIVATION, op) is None


def test_a_refusal_lists_what_is_accepted() -> None:
    node, some = candidate("conv0").node, Target(name="some", rules=(), capabilities=ROWS)
    assert some.refuse(QuantSpec(), Role.WEIGHT, node) is None
    assert some.refuse(QuantSpec(bits=6), Role.WEIGHT, node) == Refusal(
        "conv0",
        "some has no Conv kernel for 6-bit symmetric int8 per tensor weights",
        "use 4/8 bits, symmetric, int8, per tensor or per channel; or 4 bits, symmetric, int4, per block of 16/32; or "
        "8 bits, symmetric/asymmetric, int8, per tensor",
        code="R103",
    )
    nothing = some.refuse(QuantSpec(), Role.ACTIVATION, node)
    assert nothing is not None
    assert nothing.fix == "it stays float"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (QuantSpec(), "8-bit symmetric int8 per tensor"),
        (QuantSpec(signed=False, symmetric=False), "8-bit asymmetric uint8 per tensor"),
        (QuantSpec(bits=4, storage="int4", granularity=PerBlock(0, 32)), "4-bit symmetric int4 per block"),
        (QuantSpec(storage="float8e4m3fn", granularity=PerChannel(1)), "8-bit symmetric float8e4m3fn per channel"),
    ],
)
def test_specs_in_words(spec: QuantSpec, text: str) -> None:
    assert describe_spec(spec) == text


def test_targets_are_found_by_name_and_mode() -> None:
    assert {key: found for key in TARGETS if (found := find_target(*key))} == TARGETS
    assert all(not find_target(name, "float").rules and find_target(name).rules for name, _ in TARGETS)
    with pytest.raises(ConfigError, match="has no mode 'flaot'") as caught:
        find_target("ort", "flaot")
    assert caught.value.fix == "did you mean 'float'?"
    with pytest.raises(ConfigError, match="known: openvino, ort, qnn, trt, virtual") as caught:
        find_target("coral")
    assert (caught.value.code, caught.value.subject) == ("Q312", "target 'coral'")


def test_backends_with_engines_are_known_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [backend.name for backend in list_backends() if backend.engines]
    assert list_runnable(foreign=False) == loaded
    for name in list(BACKENDS):
        monkeypatch.delitem(BACKENDS, name)
    assert list_runnable(foreign=False) == loaded
    assert not BACKENDS


@pytest.mark.parametrize("key", TARGETS)
def test_every_target_is_consistent(key: tuple[str, str]) -> None:
    found = TARGETS[key]
    assert found.name == key[0]
    assert len({one.name for one in found.rules}) == len(found.rules)
    assert all(one.why and one.ops for one in found.rules)
    # An operator cannot both be without a kernel and have a rule that computes it.
    computed = {op for one in found.rules if one.compute for op in one.ops}
    assert not computed & {*found.no_kernel, *found.no_gain}
    assert found.attention_rules == {one.name for one in found.rules if one.attention}
    # Files of pages run on ONNX Runtime's native kernels as well.
    name, mode = key
    native = name in ("ort", "web") and mode in ("static", "dynamic", "auto", "float")
    assert found.saturates is (native or key == ("openvino", "static"))
    assert all(one.opt_in for one in found.rules if one.attention)
