"""Placements that are timed against each other: what each takes along, and what none may overrule."""

from collections.abc import Mapping

import onnx

from tests.planner.kit import draft, network

# A stem, a depthwise and a pointwise convolution, a squeeze-excite gate, a grouped convolution and a linear layer.
TEXT = """g (float[1,3,56,56] x) => (float[1,10] y) {
    stem = Conv<pads=[1,1,1,1]>(x, w0) a = Relu(stem)
    depthwise = Conv<pads=[1,1,1,1], group=64>(a, w1) b = Relu(depthwise) point = Conv(b, w2) c = Relu(point)
    m = GlobalAveragePool(c) squeeze = Conv(m, w3) d = Relu(squeeze) excite = Conv(d, w4) gate = Sigmoid(excite)
    e = Mul(c, gate) grouped = Conv<group=4>(e, w5) f = Relu(grouped)
    n = GlobalAveragePool(f) flat = Flatten(n) y = Gemm(flat, w6)
}"""
WEIGHTS = {
    "w0": (64, 3, 3, 3), "w1": (64, 1, 3, 3), "w2": (128, 64, 1, 1), "w3": (16, 128, 1, 1), "w4": (128, 16, 1, 1),
    "w5": (128, 32, 1, 1), "w6": (128, 10),
}  # fmt: skip
CONVS = {"stem", "depthwise", "point", "squeeze", "excite", "grouped"}


def net() -> onnx.ModelProto:
    return network(TEXT, **WEIGHTS)


def products(candidates: Mapping[str, frozenset[str]]) -> dict[str, set[str]]:
    return {name: set(chosen) & (CONVS | {"y"}) for name, chosen in candidates.items()}


def test_each_strategy_takes_the_products_it_names() -> None:
    found = products(draft(net()).candidates())
    assert found["none"] == set()
    assert found["all"] == CONVS | {"y"}
    # The others leave these out; which of them are no news beside the rules' own choice depends on the cost tables.
    left = {
        "all-but-stem": {"stem"},
        "all-but-first-two": {"stem", "depthwise"},
        "all-but-first-three": {"stem", "depthwise", "point"},
        "last-two-thirds": {"stem", "depthwise"},
        "last-half": {"stem", "depthwise", "point"},
        "no-one-channel-input": {"depthwise"},
        "no-grouped-no-gates": {"depthwise", "grouped", "squeeze", "excite"},
        "large-pointwise-and-linear": {"stem", "depthwise", "squeeze", "excite", "grouped"},
        "linear-only": CONVS,
    }
    assert found.keys() <= {"none", "rules", "all", *left}
    for name in found.keys() - {"none", "all", "rules"}:
        assert found[name] == (CONVS | {"y"}) - left[name], name
    assert len(found) >= 7


def test_no_two_are_alike_and_the_rules_own_choice_is_the_default_plan() -> None:
    problem = draft(net())
    found = problem.candidates()
    assert len(set(found.values())) == len(found)
    names = dict(zip(("stem", "depthwise", "point", "squeeze", "excite", "grouped", "y"), WEIGHTS, strict=True))
    weights = {str(site.site) for site in problem.default().sites if str(site.role) == "weight"}
    assert {names[one] for one in found["rules"] & names.keys()} == weights


def test_what_the_person_decides_holds_in_all_of_them_and_exclusions_do_not() -> None:
    rules = ({"node": "point", "set": {"float": True}}, {"node": "depthwise", "set": {"quantize": True}})
    found = draft(net(), *rules).candidates()
    for name, chosen in found.items():
        if name != "none":
            assert "point" not in chosen
            assert "depthwise" in chosen
    # By rule the stem stays float; the clock may see it otherwise.
    assert "stem" not in found["rules"]
    assert "stem" in found["all"]


def test_what_the_target_refuses_stays_float_everywhere() -> None:
    wish = {"tensor": "w2", "set": {"bits": 4, "storage": "uint4", "signed": False, "scheme": "asymmetric"}}
    assert all("point" not in chosen for chosen in draft(net(), wish).candidates().values())


def test_tensorrts_candidates_follow_its_rules_with_fewer_operators() -> None:
    found = products(draft(net(), preset="trt-int8").candidates())
    assert found["none"] == set()
    assert found["rules"] >= CONVS
    assert found["all-but-stem"] == found["rules"] - {"stem"}
    assert len(set(map(frozenset, found.values()))) == len(found)
    forced = draft(net(), {"op": "Conv", "set": {"quantize": True}}, preset="trt-int8").candidates()
    assert all(chosen >= CONVS for name, chosen in forced.items() if name != "none")


def test_tensorrt_may_have_attention() -> None:
    text = """g (float[1,4,16,32] q, float[1,4,32,16] k, float[1,4,16,32] v) => (float[1,4,16,32] o) {
        t = MatMul(q, k) p = Softmax <axis=-1>(t) o = MatMul(p, v) }"""
    found = draft(network(text), preset="trt-int8", attention="auto").candidates()
    assert {"t", "o"} <= found["attention"]
    assert not found["rules"]
    assert "attention" not in draft(network(text), preset="trt-int8", attention="float").candidates()
