"""Scales of tokens: what a quantized network computes for a token depends on no other."""

from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.errors import ConfigError, PlanError
from onnxq.passes.equalization.token_scales import write_token_scales
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import TensorId
from tests.codes.kit import model

WIDTH = 128
TOKENS = {"token_scales": True, "latency": False, "rules": [{"op": "MatMul", "set": {"quantize": True}}]}


def make_net(opset: int = 17) -> onnx.ModelProto:
    """Two layers that share an input, one behind them, and a bias; tokens of 128 channels."""
    rng = np.random.default_rng(0)
    weights = {name: (rng.standard_normal((WIDTH, WIDTH)) / 12).astype(np.float32) for name in ("q", "k", "v")}
    text = f"""g (float[B,T,{WIDTH}] x) => (float[B,T,{WIDTH}] y) {{
        a = MatMul(x, q) b = MatMul(x, k) s = Mul(a, b) h = Add(s, bias) y = MatMul(h, v)
    }}"""
    return model(text, opset, **weights, bias=rng.standard_normal(WIDTH).astype(np.float32))


def draw(batch: int) -> Any:
    """Tokens whose sizes differ by five orders of magnitude."""
    rng = np.random.default_rng(1)
    sizes = 10 ** rng.uniform(-3, 2, (batch, 4, 1))
    return (rng.standard_normal((batch, 4, WIDTH)) * sizes).astype(np.float32)


def compute_noise(net: onnx.ModelProto, got: Any, x: Any) -> Any:
    """The largest error of each token, over its largest value."""
    exact = Session(net, optimize=False).run({"x": x})["y"]
    return np.abs(got - exact).max(-1) / np.abs(exact).max(-1)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_small_tokens_keep_their_answers_beside_large_ones(mode: str) -> None:
    net, x = make_net(), draw(6)
    data = None if mode == "dynamic" else {"x": draw(16)}
    plain, scaled = (
        onnxq.quantize(net, data, overrides=TOKENS | {"mode": mode, "effort": "fast", "token_scales": tokens})
        for tokens in (False, True)
    )
    large, small = (compute_noise(net, Session(one.model).run({"x": x})["y"], x).max() for one in (plain, scaled))
    assert small < 0.1 < 0.5 < large
    alone = Session(scaled.model).run({"x": x[:1]})["y"]
    np.testing.assert_array_equal(alone, Session(scaled.model).run({"x": x})["y"][:1])


@pytest.mark.parametrize("opset", [17, 18])
def test_a_plan_repeats_them(opset: int) -> None:
    net = make_net(opset)
    found = onnxq.quantize(net, None, overrides=TOKENS | {"mode": "dynamic"})
    names = {site.quantized_tensor.name for site in found.plan.sites if not site.role.is_constant}
    assert names == {"x/scaled", "h/scaled"}
    # Nothing of a plan of constant scales was measured on made-up inputs.
    assert not any("SYNTHETIC" in str(warning) for warning in found.plan.warnings)
    again = onnxq.apply(net, from_json(to_json(found.plan)), overrides={"latency": False})
    assert again.model.SerializeToString() == found.model.SerializeToString()
    overrides = {key: TOKENS[key] for key in ("token_scales", "rules")} | {"mode": "dynamic"}
    applied = onnxq.apply(net, onnxq.make_plan(net, overrides=overrides), overrides={"latency": False})
    x = draw(3)
    assert compute_noise(net, Session(applied.model).run({"x": x})["y"], x).max() < 0.1


def test_a_tensor_without_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="feeds no layers whose tokens"):
        write_token_scales(make_net(), {TensorId("s"): np.float32([127])})


def test_engines_of_whole_graphs_refuse_them() -> None:
    with pytest.raises(ConfigError, match="token_scales"):
        onnxq.load_config("qnn-int8", overrides={"token_scales": True})
