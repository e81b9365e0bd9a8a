"""Targets as data: which rule takes a node, which reason is told, and how specs and tables read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxq.backends import (
    BACKENDS,
    Candidate,
    Capability,
    PlacementRule,
    Target,
    check_limits,
    find_target,
    list_backends,
    list_runnable,
    load_config,
)
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, NodeRef
from onnxq.sites import LeftFloat, Refusal, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec, describe_spec
from tests.backends.graphs import model
from tests.networks import parse_text

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
    return PlacementRule(**{"name": name, "ops": ("Conv",), "why": "", **fields})


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


@pytest.mark.parametrize(("rules", "taken", "reason"), [
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
])  # fmt: skip
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
    index = GraphIndex(parse_text(f"g ({kind}[N,4] x) => ({kind}[N,4] y) {{ [add] y = Add(x, x) }}"))
    taken = target(rule("a", ops=("Add",), data=(0, 1), compute=True)).rule_for(Candidate(index.nodes[0], index, {}))
    assert taken == (None, None if reason is None else Refusal(index.nodes[0].name, reason, rule="a", code="R102"))


def node(op_type: str, domain: str = "") -> NodeRef:
    return replace(candidate("conv0").node, name="n", op_type=op_type, domain=domain)


def test_operators_without_any_kernel() -> None:
    some = target(rule("a"), no_kernel={"LSTM": "none"}, no_gain={"AveragePool": "slow"})
    assert some.without_kernel(node("LSTM")) == Refusal("n", "none", rule="no-kernel", code="R101")
    assert some.without_kernel(node("AveragePool")) == LeftFloat("n", "slow", "no-kernel")
    assert some.without_kernel(node("Abs")) is None
    # Of an operator with weights that no rule names, a line says so.
    assert some.without_kernel(node("GRU")) == Refusal(
        "n", f"target {some.name} has no rule for GRU", rule="no-kernel", code="R101"
    )
    # Nor where nothing is to be quantized, as in mode `float`.
    assert target().without_kernel(node("GRU")) is None
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
    assert some.refuse(QuantSpec(), Role.ACTIVATION, node).fix == "it stays float"


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
    assert list_runnable() == loaded
    for name in list(BACKENDS):
        monkeypatch.delitem(BACKENDS, name)
    assert list_runnable() == loaded
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


# ---- A request that TensorRT cannot take is refused where it was written, with file, line and what to write instead.

WIDE = {"storage": "int16", "bits": 16}
FAULTS = [
    ("activations: {scheme: asymmetric}", "activations.scheme", "zero point", "symmetric"),
    ("weights: {scheme: asymmetric}", "weights.scheme", "zero point", "symmetric"),
    ("activations: {signed: false}", "activations.signed", "uint8", "signed: true"),
    ("weights: {signed: false}", "weights.signed", "uint8", "signed: true"),
    ("activations: {granularity: channel}", "activations.granularity", "float", "granularity: tensor"),
    ("activations: {bits: 16}", "activations.storage", "int8 or FP8", "bits: 8"),
    ("weights: {bits: 16}", "weights.storage", "int8 or FP8", "bits: 8"),
    ("weights: {bits: 4, storage: int4}", "weights.storage", "only weights", "weight-only"),
    ("weights: {granularity: block, block_size: 32}", "weights.granularity", "int4", "granularity: channel"),
    ("weights: {storage: float8e4m3fn}", "weights.storage", "FP8 by FP8", "both"),
    ("activations: {storage: float8e4m3fn}", "weights.storage", "FP8 by FP8", "both"),
    ("bias: int32", "bias", "int32", "bias: float"),
    ("emit: nbits", "emit", "MatMulNBits", "target: ort"),
    ("cpu: vnni", "cpu", "kind of CPU", "target: ort"),
    ("rules: [{op: Conv, set: {scheme: asymmetric}}]", "rules[0].set.scheme", "zero point", "symmetric"),
    ("rules: [{op: Conv, set: {signed: false}}]", "rules[0].set.signed", "uint8", "signed"),
    ("rules: [{op: Conv, set: {storage: uint8, signed: false}}]", "rules[0].set.signed", "uint8", "signed"),
    ("rules: [{op: Conv, set: {bits: 16}}]", "rules[0].set.bits", "16-bit", "float: true"),
]


@pytest.mark.parametrize(("line", "path", "cause", "fix"), FAULTS)
def test_a_fault_is_named_with_its_line(line: str, path: str, cause: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"extends: trt-int8\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.subject.endswith(f": {path}")
    # What a default holds against the line written is shown where the default stands.
    assert caught.value.subject.startswith(("trt-int8:", f"{file}:3: "))
    assert cause in caught.value.cause
    assert fix in caught.value.fix


def test_a_default_that_does_not_fit_is_shown_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    file.write_text("extends: ort-int8\ntarget: trt\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.file == "ort-int8"
    assert caught.value.subject.endswith(": activations.scheme")
    assert "extends: trt-int8" in caught.value.fix


def test_a_configuration_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"activations\.scheme"):
        check_limits(Config(target="trt"))


@pytest.mark.parametrize(
    ("preset", "overrides", "fix"),
    [
        ("virtual-int8", {}, "target: ort"),
        ("ort-int8-weights", {}, "mode: static"),
        ("ort-int8", {"placement": "measured"}, "placement: rules"),
    ],
)
def test_a_kind_of_cpu_is_for_placement_by_rules_in_ort(preset: str, overrides: dict[str, str], fix: str) -> None:
    with pytest.raises(ConfigError, match="cpu") as caught:
        load_config(preset, {**overrides, "cpu": "avx2"})
    assert fix in caught.value.fix
    assert load_config(preset, {**overrides, "cpu": "any"}).cpu == "any"


@pytest.mark.parametrize(
    ("preset", "overrides", "path", "fix"),
    [
        ("trt-int4-weights", {"weights.storage": "int16", "weights.bits": 16}, "weights.storage", "storage: int4"),
        ("trt-int4-weights", {"weights.bits": 16, "weights.storage": ""}, "weights.storage", "bits: 8"),
        ("trt-int4-weights", {"weights.bits": 8, "weights.storage": "int8"}, "weights.granularity", "channel"),
        ("trt-fp8", {"weights.storage": "int8"}, "weights.storage", "for both activations and weights"),
        ("ort-int8", {"attention": "auto"}, "attention", "attention: float"),
        ("virtual-int8", {"placement": "measured"}, "placement", "placement: rules"),
        ("trt-int8", {"rules": [{"op": "Conv", "set": WIDE}]}, "rules[0].set.bits", "float"),
        # Its levels are not evenly spaced.
        ("trt-fp8", {"activations.observer": "entropy"}, "activations.observer", "minmax"),
        ("trt-int8", {"rules": [{"op": "Conv", "set": {"storage": "uint8"}}]}, "rules[0].set.storage", "signed type"),
    ],
)
def test_limits_of_every_target(preset: str, overrides: dict[str, object], path: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=r"\[Q307\]") as caught:
        load_config(preset, overrides)
    assert caught.value.subject.endswith(path)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("trt-int4-weights", {"activations.scheme": "asymmetric"}),  # they stay float
        ("trt-fp8", {"activations.observer": "percentile"}),
        ("trt-int8", {"rules": [{"op": "Conv", "set": {"float": True}}]}),
        ("ort-int8", {"cpu": "vnni"}),
        ("ort-int8", {"weights.scheme": "asymmetric"}),
        ("ort-int4-weights", {"emit": "nbits", "accuracy_level": 4}),
        ("virtual-int8", {"weights.scheme": "asymmetric", "attention": "quantized"}),
    ],
)
def test_what_an_engine_takes_is_let_pass(preset: str, overrides: dict[str, object]) -> None:
    assert load_config(preset, overrides).target == preset.split("-")[0]


def test_int8_weights_alone_are_for_tensorrt_too() -> None:
    base = load_config("trt-int4-weights")
    wish = {"bits": 8, "storage": "int8", "granularity": "channel", "block_size": None}
    weights = base.weights.model_copy(update=wish)
    assert check_limits(base.model_copy(update={"weights": weights})).weights.granularity == "channel"


def test_a_target_without_limits_of_its_own_has_none() -> None:
    config = load_config("trt-int8", {"target": "mine", "activations.scheme": "asymmetric", "bias": "int32"})
    assert check_limits(config) is config


@pytest.mark.parametrize(
    ("preset", "overrides", "cause"),
    [
        ("ort-int8", {"emit": "nbits"}, "float data"),
        ("ort-int4-weights", {"emit": "nbits", "weights": {"block_size": 24}}, "blocks of 16"),
        ("ort-int4-weights", {"emit": "nbits", "weights": {"block_size": 512}}, "or 256 weights"),
        ("ort-int8-weights", {"emit": "nbits"}, "blocks of 16"),
        ("ort-int4-weights", {"accuracy_level": 4}, "emit: nbits"),
        ("virtual-int8", {"emit": "nbits"}, "MatMulNBits"),
    ],
)
def test_operators_are_for_weights_alone(preset: str, overrides: dict[str, object], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        load_config(preset, overrides)
