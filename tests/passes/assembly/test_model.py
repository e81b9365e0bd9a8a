"""Weights alone as MatMulNBits: the plan asks, the file has them, and every command reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import onnxq
from onnxq.config import ProveConfig
from onnxq.engines.prove.prove import ProveRequest, prove_model
from onnxq.graph.index import find_opset
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.spec import PerBlock
from tests.networks import open_session
from tests.passes.kit import parse

W = np.random.default_rng(0).laplace(size=(64, 32)).astype(np.float32)


def _net() -> onnx.ModelProto:
    return parse("g (float[rows,64] x) => (float[rows,32] y) { [m] y = MatMul(x, w) }", w=W)


def _quantize(**changes: Any) -> Any:
    bits = changes.get("weights", {}).get("bits", 4)
    overrides = {"emit": "nbits", "projection_bits": bits, "verify": {"latency": False}, **changes}
    return onnxq.quantize(_net(), None, "ort-int4-weights", overrides=overrides)


@pytest.mark.usefixtures("engines_here")
@pytest.mark.recent_ort
@pytest.mark.parametrize(("bits", "width"), [(2, 2), (3, 4), (4, 4)])
def test_the_file_has_operators_and_says_what_they_are(bits: int, width: int, tmp_path: Path) -> None:
    done = _quantize(weights={"bits": bits}, accuracy_level=4)
    (node,) = done.model.graph.node
    attrs = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    assert (node.op_type, node.name, node.domain) == ("MatMulNBits", "m", "com.microsoft")
    assert attrs == {"K": 64, "N": 32, "bits": width, "block_size": 32, "accuracy_level": 4}
    assert {entry.key: entry.value for entry in node.metadata_props}["onnxq.bits"] == str(bits)
    (pair,) = onnxq.inspect(done.model).pairs
    assert (str(pair.site), pair.role, pair.bits, pair.granularity) == ("w", Role.WEIGHT, bits, PerBlock(0, 32))
    # The plan makes the same file again, and outlives its JSON.
    assert from_json(to_json(done.plan)) == done.plan
    assert onnxq.apply(_net(), done.plan).model.SerializeToString() == done.model.SerializeToString()
    proof = prove_model(done.model, ProveRequest(options=ProveConfig(engine="ort")))
    assert [node.kind for node in proof.nodes] == ["MatMulNBits"]


def test_operators_and_pairs_compute_the_same() -> None:
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    got = []
    for emit in ("qdq", "nbits"):
        model = _quantize(emit=emit).model
        session = ReferenceEvaluator(model) if emit == "qdq" else open_session(model)
        got.append(session.run(None, {"x": x})[0])
    np.testing.assert_allclose(*got, atol=1e-4)


@pytest.mark.recent_ort
@pytest.mark.parametrize(("storage", "scheme"), [("uint2", "asymmetric"), ("int2", "symmetric")])
def test_two_bits_are_stored_in_two_and_compute_the_same_everywhere(storage: str, scheme: str) -> None:
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    made = []
    for held, emit in ((storage, "qdq"), (storage.replace("2", "4"), "qdq"), (storage, "nbits")):
        weights = {"bits": 2, "storage": held, "scheme": scheme, "signed": storage == "int2"}
        made.append(_quantize(emit=emit, weights=weights).model)
    packed, wider, operator = (Session(model, optimize=False).run({"x": x})["y"] for model in made)
    np.testing.assert_array_equal(packed, wider)
    np.testing.assert_allclose(packed, operator, atol=1e-4)
    # Blocks of 32 are what ONNX Runtime makes the operator of, which computes in int8 then.
    assert np.abs(Session(made[0]).run({"x": x})["y"] - packed).max() < 0.05 * np.abs(packed).max()
    kinds = {onnx.TensorProto.DataType.Name(one.data_type): len(one.raw_data) for one in made[0].graph.initializer}
    assert kinds[storage.upper()] in (W.size // 4, W.size // 32 // 4)
    assert find_opset(made[0]) == 25
    (pair,) = onnxq.inspect(made[0]).pairs
    assert (pair.bits, pair.granularity) == (2, PerBlock(0, 32))


def test_float16_has_scales_of_float16() -> None:
    model = _quantize(high_precision="float16", io_types="float16").model
    (node,) = model.graph.node
    held = {one.name: one.data_type for one in model.graph.initializer}
    wanted = [onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT16, onnx.TensorProto.UINT8]
    assert [held[name] for name in node.input[1:]] == wanted


def _two() -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    weights = {name: rng.laplace(size=(64, 64)).astype("f4") for name in "ab"}
    text = """g (float[rows,64] x) => (float[rows,64] y) {
        [first] h = MatMul(x, a) [relu] r = Relu(h) [last] p = MatMul(r, b) [bias] y = Add(p, c) }"""
    return parse(text, **weights, c=rng.normal(size=64).astype("f4"))


def test_the_weight_that_makes_an_output_has_a_byte() -> None:
    for changes, wanted in (({}, [4, 8]), ({"projection_bits": 4}, [4, 4])):
        overrides = {"emit": "nbits", "verify": {"latency": False}, **changes}
        done = onnxq.quantize(_two(), None, "ort-int4-weights", overrides=overrides)
        products = [node for node in done.model.graph.node if node.op_type == "MatMulNBits"]
        bits = {node.name: attr.i for node in products for attr in node.attribute if attr.name == "bits"}
        assert bits == dict(zip(("first", "last"), wanted, strict=True))


def test_blocks_get_bits_by_an_average_without_data() -> None:
    # The projection has 8 already, so that 6 on average leave nothing for the other, and 8 everything.
    for average, wanted in ((6.0, [4, 8]), (8.0, [8, 8])):
        overrides = {"weight_bits_budget": average, "verify": {"latency": False}}
        plan = onnxq.quantize(_two(), None, "ort-int4-weights", overrides=overrides).plan
        assert [site.spec.bits for site in plan.sites if site.role is Role.WEIGHT] == wanted
        assert {site.spec.storage_bits for site in plan.sites} == set(wanted)
