"""Symmetric blocks of few bits: their scales may be negative for ONNX Runtime, and have no zero points beside them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import onnxq
from onnxq.backends import load_config
from onnxq.errors import ConfigError, PlanError
from onnxq.numerics import fake_quant, quantize, weight_qparams
from onnxq.runtime import Session
from onnxq.spec import ObserverSpec, PerBlock, QuantSpec
from tests.tables import model

SYMMETRIC = {"scheme": "symmetric", "signed": True, "storage": "int4"}
SIGNED = ObserverSpec("mse", (("signed_scales", True),))
SPEC = QuantSpec(bits=4, storage="int4", granularity=PerBlock(0, 32))


def make_product(depth: int = 96, seed: int = 0) -> tuple[onnx.ModelProto, np.ndarray]:
    """One MatMul in front of an activation, and its weight."""
    weight = np.random.default_rng(seed).standard_normal((depth, 40)).astype(np.float32)
    return model("h = MatMul(x, w) y = Abs(h) z = Abs(ids)", "float[A,40] y, int64[N,S] z",
                 f", float[A,{depth}] x", w=weight), weight  # fmt: skip


def quantize_blocks(proto: onnx.ModelProto, config: str = "ort-int4-weights", **overrides: Any) -> onnxq.Result:
    overrides = {"latency": False, **overrides}
    if config.startswith("ort"):
        overrides["weights"] = SYMMETRIC
    return onnxq.quantize(proto, None, config, overrides=overrides)


def read_scales(proto: onnx.ModelProto) -> np.ndarray:
    (found,) = (one for one in proto.graph.initializer if one.name in ("w/scale", "w/scales"))
    return np.asarray(numpy_helper.to_array(found))


def test_pairs_have_scales_of_either_sign_and_no_zero_points() -> None:
    proto, weight = make_product()
    made = quantize_blocks(proto).model
    scale = read_scales(made)
    assert scale.min() < 0 < scale.max()
    (node,) = (node for node in made.graph.node if node.op_type == "DequantizeLinear")
    assert list(node.input) == ["w/quantized", "w/scale"]
    assert not [one.name for one in made.graph.initializer if "zero" in one.name]
    wanted = fake_quant(weight, weight_qparams(weight, SPEC, observer=SIGNED), SPEC)
    x = np.eye(96, dtype=np.float32)
    got = Session(made, optimize=False).run({"x": x, "ids": np.ones((1, 1), np.int64)})["y"]
    np.testing.assert_array_equal(got, np.abs(wanted))


@pytest.mark.parametrize("level", [0, 4])
def test_matmulnbits_computes_with_them(level: int) -> None:
    proto, weight = make_product()
    made = quantize_blocks(proto, emit="nbits", **({"accuracy_level": level} if level else {})).model
    (node,) = (node for node in made.graph.node if node.op_type == "MatMulNBits")
    assert [name for name in node.input if name] == ["x", "w/packed", "w/scales"]
    assert read_scales(made).min() < 0
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    wanted = np.abs(x @ fake_quant(weight, weight_qparams(weight, SPEC, observer=SIGNED), SPEC))
    got = np.asarray(Session(made).run({"x": x, "ids": np.ones((1, 1), np.int64)})["y"])
    np.testing.assert_allclose(got, wanted, atol=(2e-2 if level else 1e-5) * wanted.max())


def test_tensorrt_gets_positive_scales() -> None:
    proto, _ = make_product(depth=256)
    assert read_scales(quantize_blocks(proto, "trt-int4-weights").model).min() > 0


@pytest.mark.parametrize(
    "config", ["trt-int4-weights", "ort-int8", "ort-int8-weights", "openvino-int8", "virtual-int8"]
)
def test_other_engines_and_weights_refuse_them_by_name(config: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, {"weights": {"observer": {"name": "mse", "signed_scales": True}}})
    assert "weights.observer" in caught.value.subject
    assert "signed_scales" in caught.value.fix


@pytest.mark.parametrize(("config", "rule"), [
    ("ort-int8", "op: Conv"), ("ort-int8", "tensor: x"), ("ort-int8-weights", "role: weight"),
    ("trt-int4-weights", "op: MatMul"), ("virtual-int8", "op: MatMul"),
])  # fmt: skip
def test_so_they_do_in_a_rule_with_its_line(tmp_path: Path, config: str, rule: str) -> None:
    """Calibration found them minutes later, without file and line, on an activation or a weight without blocks."""
    observer = "observer: {name: mse, signed_scales: true}"
    path = tmp_path / "my.yaml"
    path.write_text(f"extends: {config}\nrules:\n  - {rule}\n    set:\n      {observer}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert (caught.value.file, caught.value.line) == (str(path), 5)
    assert caught.value.subject.endswith("rules[0].set.observer")
    blocks = f"{{granularity: block, block_size: 32, bits: 4, {observer}}}"
    path.write_text(f"extends: ort-int8-weights\nrules:\n  - {rule}\n    set: {blocks}\n")
    assert load_config(path).rules[0].set.observer == SIGNED


def test_a_plan_with_negative_scales_is_refused_for_tensorrt() -> None:
    proto, _ = make_product(depth=256)
    plan = quantize_blocks(proto, "trt-int4-weights").plan
    (site,) = plan.sites
    mirrored = replace(site, qparams=replace(site.qparams, scale=-site.qparams.scale))
    with pytest.raises(PlanError, match="negative") as caught:
        onnxq.apply(proto, plan.with_sites((mirrored,)))
    assert (caught.value.subject, caught.value.code) == ("w", "Q407")


@settings(max_examples=40)
@given(st.integers(0, 999), st.sampled_from([2, 3, 4]), st.booleans(), st.sampled_from([16, 32, 128]))
def test_they_are_never_worse_and_better_in_sum(seed: int, bits: int, signed: bool, size: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((128, 64)).astype(np.float32)
    spec = QuantSpec(bits=bits, signed=signed, granularity=PerBlock(0, size))
    found = [weight_qparams(weight, spec, observer=one) for one in (ObserverSpec("mse"), SIGNED)]
    plain, free = (np.square(fake_quant(weight, one, spec) - weight).reshape(-1, size, 64).sum(axis=1) for one in found)
    assert (free <= plain * (1 + 1e-6)).all()
    assert free.sum() < plain.sum() * 0.97
    levels = quantize(weight, found[1], spec)
    assert (levels.min(), levels.max()) == (spec.qmin, spec.qmax)


def test_a_symmetric_range_without_its_lowest_level_has_no_side_to_choose() -> None:
    proto, _ = make_product()
    made = onnxq.quantize(
        proto, None, "ort-int4-weights",
        overrides={"weights": {**SYMMETRIC, "narrow_range": True}, "latency": False},
    )  # fmt: skip
    assert read_scales(made.model).min() > 0
