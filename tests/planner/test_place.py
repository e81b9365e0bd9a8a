"""Which tensors get a pair, who reads it, with which spec, group and bound: small graphs, site by site."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.planner.place import Placer, intersect_bounds
from onnxq.sites import TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor
from tests.planner.kit import FORCE, MAP, POINT, draft, groups, network, table

# A Clip that starts above 0 is no activation that a range expresses.
RESIDUAL = f"""g ({MAP} x) => ({MAP} y) <float low = {{0.5}}> {{
    a = Conv(x, w, b) r = Relu(a) c = Conv(r, v) s = Add(c, r) t = Clip(s, low) y = Conv(t, z) }}"""
WEIGHTS = {"w": POINT, "b": (8,), "v": POINT, "z": POINT}

GOLDEN: dict[str, dict[str, str]] = {
    # ONNX Runtime: pairs behind every kernel, so that the next one reads what it writes, whoever else reads it.
    "ort-int8": {
        "x": "activation: a/in0", "w": "weight: a/in1", "b": "bias: a/in2", "r": "activation: *",
        "v": "weight: c/in1", "c": "activation: *", "s": "activation: *", "t": "activation: y/in0",
        "z": "weight: y/in1", "y": "output: *",
    },
    # TensorRT: inputs of products, and of the Add the skip branch alone; biases in float.
    "trt-int8": {
        "x": "activation: a/in0", "w": "weight: a/in1", "r": "activation: c/in0 s/in1", "v": "weight: c/in1",
        "t": "activation: y/in0", "z": "weight: y/in1",
    },
    # No engine: both operands of the Add.
    "virtual-int8": {
        "x": "activation: a/in0", "w": "weight: a/in1", "r": "activation: c/in0 s/in1", "v": "weight: c/in1",
        "c": "activation: s/in0", "t": "activation: y/in0", "z": "weight: y/in1",
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", GOLDEN)
def test_a_residual_block_for_each_target(preset: str) -> None:
    assert table(draft(network(RESIDUAL, **WEIGHTS), FORCE, preset=preset).default()) == GOLDEN[preset]


BODY = f"""g ({MAP} x, bool c) => ({MAP} y, {MAP} o) {{
    a = Conv(x, w) r = Relu(a) i = If (c) <
        then_branch = t () => ({MAP} p) {{ k = Conv(r, v) p = Conv(k, w) }},
        else_branch = e () => ({MAP} q) {{ l = Conv(r, u) m = Add(l, r) q = Identity(m) }}>
    y = Conv(i, z) o = Conv(r, n) }}"""
IN_BODIES: dict[str, dict[str, str]] = {
    "ort-int8": {
        "x": "activation: a/in0", "r": "activation: *",
        # Each reader inside a body has a pair of its own: no kernel forms across the border.
        "i.then_branch::k/in0": "activation: i.then_branch::k/in0", "i.then_branch::k": "activation: *",
        "i.then_branch::p": "activation: *", "i.else_branch::l/in0": "activation: i.else_branch::l/in0",
        "i.else_branch::l": "activation: *", "i.else_branch::m/in1": "activation: i.else_branch::m/in1",
        "i.else_branch::m": "activation: *", "i": "activation: y/in0", "y": "output: *", "o": "output: *",
    },
    # The pair of the main graph serves the reader there alone.
    "trt-int8": {
        "x": "activation: a/in0", "r": "activation: o/in0",
        "i.then_branch::k/in0": "activation: i.then_branch::k/in0",
        "i.then_branch::k": "activation: i.then_branch::p/in0",
        "i.else_branch::l/in0": "activation: i.else_branch::l/in0",
        "i.else_branch::m/in1": "activation: i.else_branch::m/in1", "i": "activation: y/in0",
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", IN_BODIES)
def test_bodies_have_pairs_of_their_own_for_what_they_capture(preset: str) -> None:
    found = table(draft(network(BODY, **dict.fromkeys("wvuzn", POINT)), FORCE, preset=preset).default())
    weights = {name: line for name, line in found.items() if line.startswith("weight")}
    assert {name: line for name, line in found.items() if name not in weights} == IN_BODIES[preset]
    # A weight of the main graph that a body reads is copied for each reader; one read outside bodies only is not.
    assert weights == {
        "a/in1": "weight: a/in1", "z": "weight: y/in1", "n": "weight: o/in1",
        "i.then_branch::k/in1": "weight: i.then_branch::k/in1", "i.then_branch::p/in1": "weight: i.then_branch::p/in1",
        "i.else_branch::l/in1": "weight: i.else_branch::l/in1",
    }  # fmt: skip


READERS = "g (float[4,8] x) => (float[4,8] y, float[4,8] z) {{ y = {} z = {} }}"


@pytest.mark.parametrize(
    ("first", "second", "weights"),
    [
        ("MatMul(x, w)", "MatMul(x, w)", {"w": "weight: y/in1 z/in1"}),
        ("MatMul(x, w)", "Gemm(x, w)", {"w": "weight: y/in1 z/in1"}),
        # Output channels along different axes: a copy for each.
        ("MatMul(x, w)", "Gemm<transB=1>(x, w)", {"y/in1": "weight: y/in1", "z/in1": "weight: z/in1"}),
        # One reader stays float and reads the float weight.
        ("MatMul(x, w)", "MatMul(w, x)", {"w": "weight: y/in1"}),
        ("MatMul(x, w)", "Mul(x, w)", {"w": "weight: y/in1"}),
    ],
)
def test_a_weight_is_shared_where_its_readers_want_the_same(first: str, second: str, weights: dict[str, str]) -> None:
    text = READERS.format(first, second).replace("[4,8]", "[8,8]")
    found = table(draft(network(text, w=(8, 8)), FORCE).default())
    assert {name: line for name, line in found.items() if line.startswith("weight")} == weights


def test_a_rule_for_one_reader_parts_a_shared_weight() -> None:
    proto = network(READERS.format("MatMul(x, w)", "MatMul(x, w)"), w=(8, 8))
    few = {"node": "y", "role": "weight", "set": {"bits": 4, "quantize": True}}
    plan = draft(proto, few, FORCE).default()
    assert {str(site.site): site.spec.bits for site in plan.sites} == {"x": 8, "y/in1": 4, "z/in1": 8}


@pytest.mark.parametrize(
    ("granularity", "op", "axis"),
    [
        ("channel", "Gemm(x, w)", PerChannel(1)),
        ("channel", "Gemm<transB=1>(x, w)", PerChannel(0)),
        ("channel", "MatMul(x, w)", PerChannel(1)),
        ("tensor", "MatMul(x, w)", PerTensor()),
        ("block", "Gemm(x, w)", PerBlock(0, 4)),
        ("block", "Gemm<transB=1>(x, w)", PerBlock(1, 4)),
        ("block", "MatMul(x, w)", PerBlock(0, 4)),
    ],
)
def test_scales_lie_along_outputs_and_blocks_along_what_is_summed(granularity: str, op: str, axis: object) -> None:
    wish = {"weights.granularity": granularity} | ({"weights.block_size": 4} if granularity == "block" else {})
    text = f"g (float[4,8] x) => (float[4,8] y) {{ y = {op} }}"
    plan = draft(network(text, w=(8, 8)), preset="virtual-int8", **wish).default()
    assert plan.site(TensorId("w")).spec.granularity == axis


@pytest.mark.parametrize(
    ("op", "weight", "channel", "block"), [("Conv", (4, 8, 1, 1), 0, 1), ("ConvTranspose", (8, 4, 1, 1), 1, 0)]
)
def test_scales_of_convolutions(op: str, weight: tuple[int, ...], channel: int, block: int) -> None:
    proto = network(f"g ({MAP} x) => (float[1,4,6,6] y) {{ y = {op}(x, w) }}", w=weight)
    plans = [
        draft(proto, preset="virtual-int8", **wish).default()
        for wish in ({}, {"weights.granularity": "block", "weights.block_size": 4})
    ]
    grains = [plan.site(TensorId("w")).spec.granularity for plan in plans]
    assert grains == [PerChannel(channel), PerBlock(block, 4)]


GEMM = "g (float[4,8] x) => (float[4,8] y) { a = Gemm(x, w, b) y = Gemm(a, v) }"


def test_a_gemm_writes_float_from_an_int32_bias_alone() -> None:
    text = "g (float[4,8] x) => (float[4,8] y) { y = Gemm(x, w, b) }"
    proto = network(text, w=(8, 8), b=(8,))
    assert "y" not in table(draft(proto, FORCE).default())
    assert table(draft(proto, FORCE, bias="float").default())["y"] == "output: *"
    assert table(draft(network(text.replace(", b)", ")"), w=(8, 8)), FORCE).default())["y"] == "output: *"


GEMM_WEIGHTS = {"w": (8, 8), "b": (8,), "v": (8, 8)}


def test_a_bias_derives_from_what_its_operator_reads() -> None:
    bias = draft(network(GEMM, **GEMM_WEIGHTS), FORCE).default().site(TensorId("b"))
    assert bias.derived == (TensorId("x"), TensorId("w"))
    assert (bias.spec.bits, bias.spec.storage, bias.spec.granularity) == (32, "int32", PerChannel(0))
    whole = draft(network(GEMM, **GEMM_WEIGHTS), FORCE, **{"weights.granularity": "tensor"}).default()
    assert whole.site(TensorId("b")).spec.granularity == PerTensor()


def test_a_bias_with_two_readers_is_an_input_of_each() -> None:
    text = "g (float[4,8] x) => (float[4,8] y) { a = Gemm(x, w, b) r = Relu(a) y = Gemm(r, v, b) }"
    plan = draft(network(text, **GEMM_WEIGHTS), FORCE).default()
    derived = {str(site.site): tuple(map(str, site.derived)) for site in plan.sites if site.derived}
    assert derived == {"a/in2": ("x", "w"), "y/in2": ("r", "v")}


def test_moving_and_pooling_share_one_scale_and_the_tighter_bound() -> None:
    text = f"""g ({MAP} x) => (float[1,8,3,3] y) {{
        a = Conv(x, w) r = Relu(a) m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
        t = Transpose<perm=[0,1,3,2]>(m) y = Conv(t, v) }}"""
    plan = draft(network(text, w=POINT, v=POINT), FORCE).default()
    assert groups(plan) == {frozenset("rmt")}
    assert {str(site.site): site.bound for site in plan.sites if site.group} == dict.fromkeys("rmt", (0.0, None))
    assert plan.site(TensorId("r")).group == "r"


def test_concat_shares_a_scale_for_tensorrt_and_not_for_onnxruntime() -> None:
    text = f"""g ({MAP} x) => ({MAP} y, {MAP} z) {{
        a = Conv(x, w) r = Relu(a) c = Conv(r, v) s = Relu(c) d = Concat<axis=1>(r, s) y = Conv(d, u) z = Conv(s, v)
    }}"""
    proto = network(text, w=POINT, v=POINT, u=(8, 16, 1, 1))
    assert groups(draft(proto, FORCE).default()) == set()
    trt = draft(proto, preset="trt-int8").default()
    assert groups(trt) == {frozenset("rsd")}
    assert table(trt)["r"] == "activation: c/in0 d/in0"


def test_two_observers_under_one_scale_are_told() -> None:
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) m = MaxPool<kernel_shape=[1,1]>(a) y = Conv(m, v) }}"
    proto = network(text, w=POINT, v=POINT)
    entropy = {"tensor": "m", "set": {"observer": "entropy", "quantize": True}}
    (line,) = draft(proto, entropy, FORCE).default().warnings
    assert line.code == "W122"
    assert line.startswith("m: its observer 'entropy' is not used: one scale serves it and a, whose observer is")
    both = {"tensor": ["a", "m"], "set": {"observer": "entropy", "quantize": True}}
    assert draft(proto, both, FORCE).default().warnings == ()


ZERO_POINTS = "weights with a zero point cost most of the int8 gain in ORT on the CPU, which before 1.27 runs no Conv"


@pytest.mark.parametrize(
    ("wish", "opset", "warning"),
    [
        ({}, 13, ""),
        ({"activations.bits": 6}, 13, "activations below 8 bits run in kernels of 8 bits"),
        ({"activations.bits": 16}, 21, "16-bit activations have no fused kernel"),
        ({"weights.bits": 16}, 21, "16-bit weights have no fused kernel"),
        ({"weights.bits": 4, "weights.storage": "int4"}, 21, ""),
        ({"weights.scheme": "asymmetric", "weights.signed": False}, 13, ZERO_POINTS),
    ],
)
def test_specs_beyond_int8_raise_the_opset_and_tell_their_price(wish: dict, opset: int, warning: str) -> None:
    plan = draft(network(GEMM, **GEMM_WEIGHTS), FORCE, **wish).default()
    assert plan.opset == opset
    assert [(line.code, str(line)[: len(warning)]) for line in plan.warnings] == [("W104", warning)] * bool(warning)


def test_the_price_of_a_weight_alone_names_its_operator() -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) {{ y = Conv(x, w) }}", w=POINT)
    (line,) = draft(proto, mode="weight-only").default().warnings
    assert line.startswith("ORT has no weight-only kernel for Conv: its weights")


def test_the_rule_that_asked_is_told_with_the_spec() -> None:
    wish = {"tensor": "x", "set": {"bits": 6, "quantize": True}}
    plan = draft(network(GEMM, **GEMM_WEIGHTS), wish, FORCE).default()
    told = plan.site(TensorId("x")).reason
    assert told.endswith("; rule tensor=x -> bits=6, quantize: 6-bit asymmetric uint8 per tensor")
    assert plan.site(TensorId("x")).rule == "gemm"
    # Eight columns do not pay.
    assert draft(network(GEMM, **GEMM_WEIGHTS)).default().sites == ()


def test_rules_select_a_tensor_by_what_makes_it_and_by_what_reads_it() -> None:
    proto = network(GEMM, **GEMM_WEIGHTS)
    for node in ("a", "y"):
        problem = draft(proto, {"node": node, "role": "activation", "set": {"bits": 5, "quantize": True}}, FORCE)
        assert problem.default().site(TensorId("a")).spec.bits == 5
        behind = Placer(problem, frozenset({"a", "y"})).place().rules
        assert {str(site): rule.set.bits for site, rule in behind.items()} == {
            "x": 5 if node == "a" else None, "w": None, "a": 5, "v": None, "y": 5 if node == "y" else None,
        }  # fmt: skip


@given(st.lists(st.tuples(*[st.none() | st.floats(-8, 8)] * 2), min_size=1, max_size=4))
@settings(max_examples=30)
def test_common_bounds_hold_for_every_member(found: list[tuple[float | None, float | None]]) -> None:
    low, high = intersect_bounds(found)
    lows, highs = ([end for end in ends if end is not None] for ends in zip(*found, strict=True))
    assert low == max(lows, default=None)
    assert high == min(highs, default=None)
    assert intersect_bounds(reversed(found)) == (low, high)
    assert intersect_bounds([intersect_bounds(found[:1]), *found]) == (low, high)
