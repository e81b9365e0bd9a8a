"""Ranges of tensors that few positions show are widened; those of many, of bounded and of shared tensors are not."""

from __future__ import annotations

import numpy as np
import pytest

import onnxq
from onnxq.plan import Plan
from onnxq.sites import Role, TensorId
from tests.passes.kit import parse

RNG = np.random.default_rng(1)
POOLED = """g (float[N,32,4,4] x) => (float[N,4] y) {
    c = Conv(x, w0) p = GlobalAveragePool(c) f = Flatten(p) y = Gemm(f, w1)
}"""
WEIGHTS = {
    "w0": (RNG.standard_normal((32, 32, 1, 1)) / 5).astype(np.float32),
    "w1": RNG.standard_normal((32, 4)).astype(np.float32),
}


def quantize(
    text: str, count: int, ops: tuple[str, ...], asked: float | None = 1.0
) -> tuple[Plan, dict[str, np.ndarray]]:
    feeds = {"x": np.random.default_rng(0).standard_normal((count, 32, 4, 4)).astype(np.float32)}
    rules = [{"op": op, "set": {"quantize": True}} for op in ops]
    overrides = {
        "latency": False, "rules": rules, "holdout": 0, "effort": "fast", "skip": ["cross_layer_equalization"],
        **({} if asked is None else {"min_sqnr": asked}),
    }  # fmt: skip
    proto = parse(text, **WEIGHTS)
    values = np.maximum(np.einsum("nchw,oc->nohw", feeds["x"], WEIGHTS["w0"][:, :, 0, 0]).mean((2, 3)), -np.inf)
    return onnxq.quantize(proto, feeds, overrides=overrides).plan, {"p": values}


def reach(plan: Plan, name: str) -> float:
    qparams = next(s.qparams for s in plan.sites if s.site == TensorId(name) and s.role is not Role.WEIGHT)
    assert qparams is not None
    return 255 * float(qparams.scale)


# With up to 64 samples a request that is met with room to spare widens all ranges by a tenth.
@pytest.mark.parametrize(("count", "factor"), [(32, 1.25 * 1.1), (128, 1.0)])
@pytest.mark.parametrize("ops", [("Conv", "GlobalAveragePool"), ("Conv", "GlobalAveragePool", "Gemm")])
def test_ranges_of_few_positions_reach_further(count: int, factor: float, ops: tuple[str, ...]) -> None:
    plan, values = quantize(POOLED, count, ops)
    assert reach(plan, "p") == pytest.approx(factor * (values["p"].max() - values["p"].min()), rel=1e-3)
    # A tensor of a group has the scale of the others.
    scales = {float(site.qparams.scale) for site in plan.sites if site.group == "p" and site.qparams is not None}
    assert len(scales) <= 1


def test_without_a_request_ranges_are_those_of_the_samples() -> None:
    plan, values = quantize(POOLED, 32, ("Conv", "GlobalAveragePool"), None)
    assert reach(plan, "p") == pytest.approx(values["p"].max() - values["p"].min(), rel=1e-3)


def test_ranges_of_many_positions_stay() -> None:
    few, many = quantize(POOLED, 32, ("Conv", "GlobalAveragePool"))[0], quantize(POOLED, 32, ("Conv",))[0]
    assert reach(few, "c") == pytest.approx(reach(many, "c"))


def test_a_sigmoid_reaches_no_further() -> None:
    text = POOLED.replace("f = Flatten(p)", "s = Sigmoid(p) f = Flatten(s)")
    plan, _ = quantize(text, 32, ("Conv", "GlobalAveragePool", "Sigmoid", "Gemm"))
    bounded = [site for site in plan.sites if str(site.site) in ("s", "f") and site.qparams is not None]
    assert bounded
    assert all("widened" not in site.qparams.origin for site in bounded if str(site.site) == "s")
