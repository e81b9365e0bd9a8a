"""The target without an engine: any bits and scheme, pairs where it says, and a file that computes them."""

from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_target, load_config
from onnxq.backends.virtual.rules import VIRTUAL
from onnxq.errors import ConfigError
from onnxq.evaluation.accumulator import measure_error
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.backends.graphs import judge, model

NET = """g (float[N,4,8,8] x) => (float[N,5] y) {
    a = Conv <pads=[1,1,1,1]> (x, w, b) r = Relu(a) c = Conv <pads=[1,1,1,1]> (r, v) s = Add(c, x)
    t = ConvTranspose <strides=[2,2]> (s, u) p = GlobalAveragePool(t) f = Flatten(p) y = Gemm <transB=1> (f, g, h)
}"""
WEIGHTS = {"w": (4, 4, 3, 3), "b": (4,), "v": (4, 4, 3, 3), "u": (4, 3, 2, 2), "g": (5, 3), "h": (5,)}
ATTENTION = """g (float[N,4,8] q, float[N,4,8] k, float[N,1,1] mask) => (float[N,4,8] y) {
    t = Transpose <perm=[0,2,1]> (k) s = MatMul(q, t) m = Add(s, mask) p = Softmax(m) y = MatMul(p, k)
}"""


def samples(shapes: dict[str, tuple[int, ...]], count: int = 3) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{k: rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()} for _ in range(count)]


def sites(plan: onnxq.Plan) -> dict[str, str]:
    return {str(site.tensor): str(site.role) for site in plan.sites}


def test_pairs_stand_where_the_rules_say() -> None:
    result = onnxq.quantize(model(NET, weights=WEIGHTS), samples({"x": (1, 4, 8, 8)}), "virtual-int8")
    found = sites(result.plan)
    assert [name for name, role in found.items() if role == "weight"] == ["w", "v", "u", "g"]
    assert {name for name, role in found.items() if role == "activation"} == {"x", "r", "c", "s", "t", "f"}
    assert "a" not in found  # one kernel with the Relu behind
    assert result.plan.target == "virtual"
    onnx.checker.check_model(result.model)


def test_both_operands_of_a_product_have_pairs_and_masked_scores_none() -> None:
    shapes = {"q": (1, 4, 8), "k": (1, 4, 8), "mask": (1, 1, 1)}
    result = onnxq.quantize(model(ATTENTION, weights={}), samples(shapes), "virtual-int8")
    assert set(sites(result.plan)) == {"q", "t", "p", "k"}
    assert any("masked with -inf" in refusal.reason for refusal in result.plan.refusals)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_every_width_and_scheme_is_taken_and_computed(bits: int, scheme: str, granularity: str) -> None:
    wish = {"bits": bits, "scheme": scheme}
    config = load_config(
        "virtual-int8", {"weights": {**wish, "signed": None, "granularity": granularity}, "activations": wish}
    )
    proto, data = model(NET, weights=WEIGHTS), samples({"x": (1, 4, 8, 8)})
    result = onnxq.quantize(proto, data, config, overrides={"latency": False, "effort": "fast"})
    assert {site.spec.bits for site in result.plan.sites} == {bits}
    assert len(result.plan.sites) == 10
    exact = Session(result.model, optimize=False).run(data[0])["y"]
    assert np.isfinite(exact).all()
    if bits >= 7:
        assert measure_error(Session(proto).run(data[0])["y"], exact).sqnr_db > 20


def test_it_accepts_what_no_engine_does() -> None:
    engine = find_target("virtual")
    for role in (Role.ACTIVATION, Role.WEIGHT, Role.OUTPUT):
        wish = load_config("virtual-int8", {"weights": {"bits": 3, "scheme": "asymmetric", "signed": None}}).weights
        assert engine.capability(wish.spec(1), role, "Anything") is not None
    assert find_target("virtual", "weight-only") is engine


def test_placements_are_not_timed_for_no_engine() -> None:
    with pytest.raises(ConfigError, match="this target is none"):
        load_config("virtual-int8", {"placement": "measured"})


@pytest.mark.parametrize(("node", "rule"), [
    ("Conv(x, w)", "conv"), ("ConvTranspose(x, w)", "conv"), ("Conv(w, w)", None), ("MatMul(x, x)", "product"),
    ("MatMul(x, w)", None), ("Add(x, z)", "two-operands"), ("Sub(x, z)", "two-operands"), ("Add(x, x)", None),
    ("Mul(x, one)", None), ("AveragePool<kernel_shape=[1,1]>(x)", "one-operand"), ("Softmax(x)", "softmax"),
    ('Resize<mode="linear">(x, , f)', "resize"), ('Resize<mode="nearest">(x, , f)', None), ("Relu(x)", None),
    ("MaxPool<kernel_shape=[1,1]>(x)", None),
])  # fmt: skip
def test_which_rule_takes_a_node(node: str, rule: str | None) -> None:
    text = f"g (float[1,8,8,8] x, float[1,8,8,8] z) => (float[a,b,c,d] y) {{ [n] y = {node} }}"
    found, reason = judge(VIRTUAL, text)
    assert found == rule
    # Whatever has a rule has a reason without it; other operators are nobody's wish.
    assert bool(reason) is (rule is None and node[:4] not in ("Relu", "MaxP"))


def test_masked_scores_and_masks_have_no_pair() -> None:
    text = """g (float[1,4,4] x, float[1,4,4] mask) => (float[1,4,4] y, float[1,4,4] z) {
        [add] total = Add(x, mask) [soft] y = Softmax(total) [free] z = Softmax(x) }"""
    assert judge(VIRTUAL, text, "add")[1] == "masks scores, maybe with -inf, which no range holds"
    assert judge(VIRTUAL, text, "soft")[1] == "reads scores that may be masked with -inf, which no range holds"
    assert judge(VIRTUAL, text, "free") == ("softmax", "")
