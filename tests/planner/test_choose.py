"""Which operators run in integers, and the reason that each of the others is given."""

import onnx
import pytest

from onnxq.backends import find_target, load_config
from onnxq.graph import GraphIndex
from onnxq.planner import state_placement
from onnxq.planner.choose import choose_ops, decide_sides, weigh_forced
from onnxq.planner.problem import QuantizableOps, find_quantizable_ops
from onnxq.sites import Edge, LeftFloat, Refusal, Role, TensorId
from tests.planner.kit import FORCE, MAP, POINT, draft, network, reasons, table


def attention() -> onnx.ModelProto:
    text = """g (float[1,4,16] x) => (float[1,4,16] y) {
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
        t = Transpose<perm=[0,2,1]>(k) s = MatMul(q, t) p = Softmax(s) o = MatMul(p, v) y = MatMul(o, wo)
    }"""
    return network(text, **dict.fromkeys(("wq", "wk", "wv", "wo"), (16, 16)))


def rule(node: str, **change: object) -> dict:
    return {"node": node, "set": change or {"quantize": True}}


LAYERS = {"q", "k", "v", "y"}
PRODUCTS = {"s", "o"}


@pytest.mark.parametrize(("rules", "chosen", "why"), [
    # Off unless somebody asks, and on only together.
    ((), LAYERS, {"s": ("attention-qk", "F104"), "o": ("attention-pv", "F104")}),
    ((rule("s"), rule("o")), LAYERS | PRODUCTS, {}),
    ((rule("s"),), LAYERS, {"s": ("attention-qk", "R105"), "o": ("attention-pv", "F104")}),
    ((rule("o"),), LAYERS, {"s": ("attention-qk", "F104"), "o": ("attention-pv", "R105")}),
    ((FORCE,), LAYERS | PRODUCTS, {}),
    ((rule("q", float=True),), LAYERS - {"q"}, {
        "q": ("configuration", "F101"), "s": ("attention-qk", "F104"), "o": ("attention-pv", "F104"),
    }),
])  # fmt: skip
def test_rules_alone_decide_for_tensorrt(rules: tuple[dict, ...], chosen: set[str], why: dict) -> None:
    problem = draft(attention(), *rules, preset="trt-int8")
    assert choose_ops(problem).chosen == chosen
    assert reasons(problem.default()) == why


def test_rules_for_attention_are_on_where_it_is_to_be_tried() -> None:
    problem = draft(attention(), preset="trt-int8")
    found = choose_ops(problem, attention=True)
    assert (found.chosen, found.reasons) == (LAYERS | PRODUCTS, ())
    forced = draft(attention(), FORCE, preset="trt-int8")
    assert table(problem.default(attention=True)) == table(forced.default())
    left = draft(attention(), rule("s", float=True), preset="trt-int8")
    assert {one.subject: one.code for one in choose_ops(left, attention=True).reasons} == {"s": "F101", "o": "R105"}


def test_a_partner_that_stays_float_is_named() -> None:
    (refusal,) = draft(attention(), rule("s"), preset="trt-int8").default().refusals
    assert refusal.reason == "its kernel exists only together with o, which stays float"
    assert refusal.fix == "force o as well"


ADD = f"g ({MAP} x, {MAP} z) => ({MAP} y) {{ a = Conv(x, w) s = Add(a, z) y = Conv(s, v) }}"


def test_a_follower_is_forced_only_where_what_it_reads_is_quantized() -> None:
    (refusal,) = draft(network(ADD, w=POINT, v=POINT), FORCE).default().refusals
    assert (refusal.subject, refusal.rule, refusal.code) == ("s", "residual-add", "R105")
    assert refusal.fix == "force what it reads as well, or take `quantize: true` from its rule"
    both = network(ADD.replace("Add(a, z)", "Add(a, c)").replace("s =", "c = Conv(z, w) s ="), w=POINT, v=POINT)
    assert reasons(draft(both, FORCE).default()) == {}
    # What it reads has a pair for another reader's sake.
    shared = network(ADD.replace("s =", "c = Conv(z, w) s =").replace("(s, v)", "(s, v) u = Neg(c)"), w=POINT, v=POINT)
    assert "s" in choose_ops(draft(shared, FORCE)).chosen
    off = draft(shared, rule("a", float=True), FORCE)
    assert ("s", "R105") in {(one.subject, one.code) for one in choose_ops(off).reasons}


def test_one_that_is_named_is_forced_wherever_it_stands() -> None:
    """Its neighbours stay float: they are nobody's wish."""
    problem = draft(network(ADD, w=POINT, v=POINT), rule("a", float=True), rule("y", float=True), rule("s"))
    assert choose_ops(problem).chosen == {"s"}
    assert set(reasons(problem.default())) == {"a", "y"}


BOTH = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) b = LeakyRelu(a) y = Conv(b, v) }}"


def test_the_persons_rules_come_before_size_and_exclusions() -> None:
    proto = network(BOTH, w=POINT, v=POINT)
    assert choose_ops(draft(proto)).chosen == frozenset()
    assert reasons(draft(proto).default()) == {"a": ("size", "F102"), "y": ("size", "F102")}
    assert choose_ops(draft(proto, rule("y"))).chosen == {"y"}
    assert choose_ops(draft(proto, rule("b", float=True), FORCE)).chosen == {"a", "y"}
    sides, why = decide_sides(draft(proto, rule("a", float=True), rule("y")))
    assert sides == {"a": False, "y": True}
    assert why == {"a": LeftFloat("a", "left float by rule node=a -> float", "configuration", "F101")}


def test_what_rules_force_is_told_with_its_cost() -> None:
    proto = network(BOTH, w=POINT, v=POINT)
    found = weigh_forced(draft(proto, rule("y"), rule("b", bits=8)))
    assert found.names == ("y",)
    assert found.slowdown > 1
    assert weigh_forced(draft(proto, FORCE)).names == ("a", "b", "y")
    # Nobody forces, nothing is forced that would not be chosen, or no times are predicted.
    wide = network("g (float[64,512] x) => (float[64,512] y) { y = MatMul(x, w) }", w=(512, 512))
    assert choose_ops(draft(wide)).chosen == {"y"}
    for problem in (draft(proto), draft(wide, FORCE), draft(proto, FORCE, preset="trt-int8")):
        assert weigh_forced(problem) is None


@pytest.mark.parametrize("sized", [True, False])
def test_without_the_sizes_of_the_deployment_every_product_is_worth_its_integers(sized: bool) -> None:
    found = choose_ops(draft(network(BOTH, w=POINT, v=POINT)), sized=sized)
    assert {"a", "y"} & found.chosen == (set() if sized else {"a", "y"})


def test_a_reason_by_size_says_what_costs_more() -> None:
    small = choose_ops(draft(network(BOTH, w=POINT, v=POINT))).reasons
    assert all(one.reason.endswith("its int8 kernel is predicted no faster than the float one") for one in small)
    # One wide convolution between float neighbours: its kernel is faster, and its pairs cost more than that.
    text = "g (float[1,64,14,14] x) => (float[1,64,14,14] y) { h = Tanh(x) a = Conv(h, w) y = Tanh(a) }"
    (lonely,) = choose_ops(draft(network(text, w=(64, 64, 1, 1)), cpu="avx2")).reasons
    assert lonely.reason.endswith("dequantizing what it writes costs more than it saves")


def test_reasons_come_in_the_order_of_the_network() -> None:
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) b = Conv(a, w) c = Conv(b, w) y = Conv(c, w) }}"
    problem = draft(network(text, w=POINT), rule("c", float=True), rule("a", float=True))
    assert [one.subject for one in choose_ops(problem).reasons] == ["a", "b", "c", "y"]


# The bias stays float where nothing but weights is quantized.
WEIGHTS = "g (float[4,32] x) => (float[4,32] y) { a = MatMul(x, w) b = MatMul(a, v) y = Gemm(b, u, c) }"


@pytest.mark.parametrize(
    ("preset", "rules", "chosen", "why"),
    [
        ("ort-int8-weights", (), {"a", "b", "y"}, {}),
        ("ort-int8-weights", (rule("b", float=True),), {"a", "y"}, {"b": ("configuration", "F101")}),
        # Blocks have a kernel for MatMul alone.
        ("ort-int4-weights", (), {"a", "b"}, {"y": ("gemm", "R103")}),
        ("ort-int4-weights", (rule("y", float=True),), {"a", "b"}, {"y": ("gemm", "R103")}),
        ("virtual-int8", (), {"a", "b", "y"}, {}),
    ],
)
def test_weights_alone(preset: str, rules: tuple[dict, ...], chosen: set[str], why: dict) -> None:
    mode = {"mode": "weight-only"} if preset == "virtual-int8" else {}
    problem = draft(network(WEIGHTS, w=(32, 32), v=(32, 32), u=(32, 32), c=(32,)), *rules, preset=preset, **mode)
    assert choose_ops(problem).chosen == chosen
    assert reasons(problem.default()) == why
    assert {str(site.role) for site in problem.default().sites} == {"weight"}


def test_products_of_two_activations_have_no_weight_to_pack() -> None:
    found = choose_ops(draft(attention(), preset="ort-int8-weights"))
    assert (found.chosen, found.reasons) == (LAYERS, ())


@pytest.mark.parametrize(
    ("rules", "chosen"),
    [
        # The Add follows the convolution that computes it, the Concat the pairs that r and d have for others.
        ((), {"a", "c", "y", "z", "s", "d"}),
        # Forcing what only follows means nothing.
        ((rule("s"), rule("d"), rule("e")), {"a", "c", "y", "z", "s", "d"}),
        ((rule("s", float=True),), {"a", "c", "y", "z", "d"}),
        ((rule("d", float=True),), {"a", "c", "y", "z", "s"}),
        # Without a pair behind there is nothing to share with; without a product no sum.
        ((rule("y", float=True),), {"a", "c", "z", "s"}),
        ((rule("c", float=True),), {"a", "y", "z"}),
    ],
)
def test_followers_for_tensorrt(rules: tuple[dict, ...], chosen: set[str]) -> None:
    text = f"""g ({MAP} x) => ({MAP} y, {MAP} z) {{
        a = Conv(x, w) r = Relu(a) c = Conv(r, v) s = Add(c, r)
        d = Concat<axis=1>(r, s) e = Concat<axis=1>(c, c) y = Conv(d, u) z = Conv(e, u)
    }}"""
    proto = network(text, w=POINT, v=POINT, u=(8, 16, 1, 1))
    assert choose_ops(draft(proto, *rules, preset="trt-int8")).chosen == chosen


STATE = "float[4,256]"
SQUARE = "float[256,256]"
# The first step of a loop stands in front of it, as exporters write it. The body is given the weight, or reads it.
LOOPS = {
    "given": f"""r, last = Loop(n, go, h, w) <body = step (int64 k, bool on, {STATE} a, {SQUARE} c)
        => (bool more, {STATE} b, {SQUARE} d) {{ more = Identity(on) b = MatMul(a, c) d = Identity(c) }}>""",
    "read": f"""r = Loop(n, go, h) <body = step (int64 k, bool on, {STATE} a)
        => (bool more, {STATE} b) {{ more = Identity(on) b = MatMul(a, w) }}>""",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("preset", ["ort-int8", "trt-int8", "ort-int8-weights"])
def test_a_weight_that_a_loop_computes_on_in_float_is_stored_once(loop: str, preset: str) -> None:
    text = f"g ({STATE} x, int64 n, bool go) => ({STATE} y) {{ h = MatMul(x, w) {LOOPS[loop]} y = MatMul(r, v) }}"
    proto = network(text, w=(256, 256), v=(256, 256))
    # Weights alone, and those beside scales of each run, are quantized in bodies too, where the body reads them.
    shared = loop == "read" and preset != "trt-int8"
    closed = {} if preset == "ort-int8-weights" else {"r.body": Refusal("r.body", "it is the body of a Loop")}
    choice = choose_ops(state_placement(proto, load_config(preset), closed=closed))
    assert choice.chosen - {"b"} == ({"h", "y"} if shared else {"y"})
    assert [(one.subject, one.code) for one in choice.reasons] == ([] if shared else [("h", "F103")])


def test_rules_may_store_a_weight_twice() -> None:
    text = f"g ({STATE} x, int64 n, bool go) => ({STATE} r) {{ h = MatMul(x, w) {LOOPS['given']} }}"
    assert "h" in choose_ops(draft(network(text, w=(256, 256)), FORCE)).chosen


# ---- Quantizable operators: which nodes they are, the activation that goes with each, and the tensors they read.


def found(proto: onnx.ModelProto, target: str = "ort", **options: object) -> QuantizableOps:
    return find_quantizable_ops(GraphIndex(proto), find_target(target), {}, **options)  # type: ignore[arg-type]


CLIPS = f"g ({MAP} x, float given) => ({MAP} y) <{{}}> {{{{ a = Conv(x, w) y = {{}} }}}}"


@pytest.mark.parametrize(
    ("constants", "node", "bound"),
    [
        ("", "Relu(a)", (0.0, None)),
        ("", "Clip(a)", (None, None)),
        ("float low = {0.0}, float high = {6.0}", "Clip(a, low, high)", (0.0, 6.0)),
        ("float low = {-1.0}", "Clip(a, low)", (-1.0, None)),
        ("float[1] high = {1.0}", "Clip(a, , high)", (None, 1.0)),
        ("float high = {0.0}", "Clip(a, , high)", (None, 0.0)),
        # Asymmetric ranges hold 0, so these cannot be expressed.
        ("float low = {0.5}", "Clip(a, low)", None),
        ("float high = {-0.5}", "Clip(a, , high)", None),
        # Known at run time only.
        ("", "Clip(a, given)", None),
        ("float low = {0.0}", "Clip(a, low, given)", None),
    ],
)
def test_bounds_of_activations(constants: str, node: str, bound: object) -> None:
    op = found(network(CLIPS.format(constants, node).replace(" <>", ""), w=POINT)).by_name["a"]
    assert (op.activation is None, op.bound) == ((True, (None, None)) if bound is None else (False, bound))


def test_bounds_of_old_opsets_are_attributes() -> None:
    old = network(CLIPS.format("", "Clip<min=-1.0, max=2.0>(a)").replace(" <>", ""), opset=10, w=POINT)
    assert found(old).by_name["a"].bound == (-1.0, 2.0)


@pytest.mark.parametrize(
    ("behind", "activation", "out"),
    [
        ("y = Relu(a)", "y", "y"),
        ("y = Clip(a)", "y", "y"),
        ("y = LeakyRelu(a)", None, "a"),  # an operator of its own
        ("y = Sigmoid(a)", None, "a"),
        ("r = Relu(a) y = Add(r, a)", None, "a"),  # somebody else reads it in front of the Relu
        ("y = Clip(a, low)", None, "a"),
        ("y = PRelu(x, a)", None, "a"),
    ],
)
def test_the_activation_that_a_kernel_computes(behind: str, activation: str | None, out: str) -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) <float low = {{0.5}}> {{ a = Conv(x, w) {behind} }}", w=POINT)
    ops = found(proto)
    op = ops.by_name["a"]
    assert (None if op.activation is None else op.activation.name, op.out) == (activation, TensorId(out))
    assert ops.by_out[op.out] is op


def test_an_output_of_the_model_and_a_reader_in_a_body_end_an_operator() -> None:
    text = f"g ({MAP} x) => ({MAP} y, {MAP} a) {{ a = Conv(x, w) y = Relu(a) }}"
    assert found(network(text, w=POINT)).by_name["a"].activation is None
    body = f"""g ({MAP} x, bool c) => ({MAP} y) {{
        a = Conv(x, w)
        y = If (c) <then_branch = t () => ({MAP} p) {{ p = Relu(a) }},
                    else_branch = e () => ({MAP} q) {{ q = Identity(x) }}>
    }}"""
    assert found(network(body, w=POINT)).by_name["a"].activation is None


def test_weights_biases_and_data_are_named_by_their_edges() -> None:
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w, b) s = Add(a, x) y = Conv(s, w) }}"
    ops = found(network(text, w=POINT, b=(8,)))
    first, add, last = ops
    assert (first.weight, first.bias, last.bias) == (Edge("a", 1), Edge("a", 2), None)
    assert add.data == ((Edge("s", 0), TensorId("a")), (Edge("s", 1), TensorId("x")))
    assert (add.weight, add.bias) == (None, None)
    assert first.roles == [(Role.ACTIVATION, TensorId("x")), (Role.WEIGHT, TensorId("w"))]
    assert add.roles == [(Role.ACTIVATION, TensorId("a")), (Role.ACTIVATION, TensorId("x"))]
    # x is data of the first and of the Add; w is nobody's activation.
    consumers = [(edge.node, op and op.name) for edge, op in ops.list_consumers(TensorId("x"))]
    assert consumers == [("a", "a"), ("s", "s")]
    assert [op for _, op in ops.list_consumers(TensorId("w"))] == [None, None]


def test_rules_may_choose_the_inputs_and_the_end() -> None:
    skip = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) r = Relu(a) c = Conv(r, w) s = Add(c, r) y = Conv(s, w) }}"
    assert found(network(skip, w=POINT), "trt").by_name["s"].data == ((Edge("s", 1), TensorId("r")),)
    concat = f"g ({MAP} x, {MAP} z) => (float[1,16,6,6] y) {{ y = Concat<axis=1>(x, z) }}"
    assert [edge for edge, _ in found(network(concat)).by_name["y"].data] == [Edge("y", 0), Edge("y", 1)]


def test_closed_nodes_and_those_at_pairs_that_cannot_be_shared_are_left_alone() -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) b = Conv(a, w) y = Conv(b, w) }}", w=POINT)
    assert list(found(proto, closed=lambda node: node.name == "b").by_name) == ["a", "y"]
    # The scale is computed, so nobody else can read this pair: its neighbours are somebody's work.
    own = f"""g ({MAP} x, float s) => ({MAP} y) <uint8 z = {{0}}> {{
        a = Conv(x, w) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) b = Conv(d, w) y = Conv(b, w)
    }}"""
    assert list(found(network(own, w=POINT)).by_name) == ["y"]


def test_nodes_that_no_rule_takes_come_back_with_the_reason() -> None:
    text = f"g ({MAP} x, float[8,8,1,1] k) => ({MAP} y) {{ a = Conv(x, k) b = ConvTranspose(a, w) y = Conv(b, w) }}"
    ops = found(network(text, w=POINT))
    assert list(ops.by_name) == ["y"]
    assert [(one.subject, one.reason) for one in ops.reasons] == [
        ("a", "its weight is computed at run time: no quantized kernel takes it")
    ]
