"""Rotated decoders compute what they did, in every form of norm and attention; what cannot be rotated says why."""

import hashlib
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.errors import PlanError
from onnxq.graph import GraphIndex
from onnxq.passes.equalization import rotation
from onnxq.passes.equalization.stream_rules import find_streams
from onnxq.plan import Rotation
from onnxq.sites import TensorId
from tests.networks import count_ops
from tests.passes.equalization.decoders import HD, D, make_decoder, make_feeds
from tests.passes.kit import infer, parse, random_weights

FORMS: dict[str, dict[str, Any]] = {
    "written out": {},
    "reciprocal": {"norm": "reciprocal", "tied": True},
    "opset 23": {"norm": "rms", "attention": "one node", "opset": 23},
    "fused": {"norm": "simplified", "attention": "genai"},
    "fused with its sum": {"norm": "simplified", "skip": True},
    "layer norm": {"norm": "layernorm"},
    "layer norm with its sum": {"norm": "layernorm", "skip": True, "tied": True},
    "layer norm written out": {"norm": "written-out"},
}


def run(model: onnx.ModelProto, genai: bool = False) -> np.ndarray:
    return np.asarray(infer(model, make_feeds(genai))[0], np.float64)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_rotated_decoder_computes_the_same(form: str) -> None:
    model = make_decoder(**FORMS[form])
    rotations = rotation.list_rotations(model, 1)
    # The residual stream, and the values of each head.
    assert [(one.tensor.name, one.size) for one in rotations] == [("x0", D), ("v0", HD)]
    assert not rotation.list_fixed(model)
    after, _ = rotation.write_rotations(model, rotations)
    before = run(model, "genai" in form or form == "fused")
    limit = 1e-5 * np.abs(before).max()
    np.testing.assert_allclose(run(after, "genai" in form or form == "fused"), before, rtol=0, atol=limit)
    # Biases of layer norms go where there is none yet; no other node comes or goes.
    added = count_ops(after) - count_ops(model)
    assert set(added) <= ({"Add"} if "layer norm" in form else set())
    index = GraphIndex(after)
    for name, value in ((name, index.find_constant(TensorId(name))) for name in ("n0g", "n1g", "n2g")):
        assert value is None or bool((value == 1).all()), name
    w = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert not np.allclose(numpy_helper.to_array(next(t for t in after.graph.initializer if t.name == "wd")), w["wd"])


def test_outliers_of_single_channels_become_parts_of_all() -> None:
    table = np.random.default_rng(0).standard_normal((40, D)).astype(np.float32)
    table[:, 5] *= 50
    model = make_decoder(E=table)
    after, _ = rotation.write_rotations(model, rotation.list_rotations(model, 1)[:1])
    turned = GraphIndex(after).find_constant(TensorId("E"))
    assert np.abs(turned).max() < np.abs(table).max() / 3
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(table, axis=1), rtol=1e-6)


def test_a_tied_table_is_written_twice_where_a_norm_scales_it_for_one_reader_only() -> None:
    gemm = {"norm": "rms", "attention": "one node", "opset": 23}
    text = "z = Reshape(n2, flat) tied = Gemm<transB=1>(z, E)"
    flat = {"more": text, "outputs": ", float[M,40] tied"}

    def make(**arrays: np.ndarray) -> onnx.ModelProto:
        model = make_decoder(**gemm, **flat, **arrays)  # type: ignore[arg-type]
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1, D]), "flat"))
        return model

    for model, copies in ((make(), ("E",)), (make(n2g=np.full(D, 3)), ())):
        after, copied = rotation.write_rotations(model, rotation.list_rotations(model, 1))
        assert copied == copies
        for old, new in zip(infer(model, make_feeds()), infer(after, make_feeds()), strict=True):
            np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(old).max())


# Nodes that meet the stream, and the reason that is given.
MET = {
    "y = Identity(x1)": "y is an output",
    "y = Relu(x1)": "Relu) reads x1",
    "y = ReduceSum<axes=[-1]>(n1)": "ReduceSum) reads n1",
    "z = Tanh(x0) y = Add(z, x1)": "Tanh) reads x0",
    "y = Transpose<perm=[0,2,1]>(x2)": "y is an output",
    "y = Identity(v)": "y is an output",
}


@pytest.mark.parametrize("met", list(MET))
def test_a_stream_whose_channels_somebody_asks_for_is_left(met: str) -> None:
    opset = 11 if "ReduceSum" in met else 17
    model = make_decoder(more=met, outputs=", float[a,b,c] y", opset=opset)
    left = {"v0"} if met.endswith("(v)") else {"x0"}
    fixed = rotation.list_fixed(model)
    assert {one.subject for one in fixed} == left
    assert MET[met] in fixed[0].reason
    assert fixed[0].code == "R112"
    # The values of heads alone are not worth a trial.
    assert [one.tensor.name for one in rotation.list_rotations(model, 1)] == (["x0"] if left == {"v0"} else [])


def test_a_stream_that_a_gemm_adds_to_its_product_is_left() -> None:
    text = """g (int64[3] rows, float[3,16] x) => (float[3,8] y, float[3,16] z) {
        c = Gather(table, rows) y = MatMul(c, v) z = Gemm(x, w, c) }"""
    model = parse(text, **random_weights({"table": (10, 16), "v": (16, 8), "w": (16, 16)}))
    (stream,) = [stream for stream in find_streams(GraphIndex(model)).list_streams() if stream.tensor.name == "c"]
    assert stream.readers
    assert "Gemm) reads c" in stream.reason


def test_rotations_of_another_network_are_refused() -> None:
    model = make_decoder(more="y = Relu(x1)", outputs=", float[a,b,c] y")
    for name, size in (("x0", D), ("v0", D), ("nowhere", HD)):
        with pytest.raises(PlanError, match=r"no stream.*\[Q404\]"):
            rotation.write_rotations(model, [Rotation(tensor=TensorId(name), seed=0, size=size)])


# ---- Hadamard matrices by Sylvester, Paley and blocks: orthogonal, flat, the mean left alone, a seed for bytes.


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 60, 84])
def test_paley_gives_orthogonal_signs(order: int) -> None:
    found = rotation.make_paley(order)
    assert set(np.unique(found)) <= {-1, 1}
    assert np.array_equal(found.astype(int) @ found.T.astype(int), order * np.eye(order))


def test_sizes_are_doubled_from_a_small_matrix_or_cut_into_blocks() -> None:
    assert rotation.make_paley(92) is None
    assert [rotation.find_base(size) for size in (1, 64, 80, 96, 768, 896, 2304, 30)] == [1, 1, 20, 12, 12, 28, 36, 0]
    assert [rotation.split_size(size) for size in (768, 30, 27, 100)] == [(768,), (28, 2), (24, 2, 1), (96, 4)]


@pytest.mark.parametrize("level", [False, True])
@pytest.mark.parametrize("size", [1, 2, 27, 64, 80, 96])
def test_a_rotation_is_orthogonal_and_spreads_single_channels(size: int, level: bool) -> None:
    q = rotation.Hadamard(3, size, level).turn_channels(np.eye(size), -1)
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-12)
    if level:
        np.testing.assert_allclose(q.sum(axis=1), 1, atol=1e-12)
    if len(rotation.split_size(size)) == 1:
        assert np.abs(q).max() * np.sqrt(size) < (4 if level else 1.000001)


def test_both_sides_of_a_product_turn_alike_and_parts_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 48)), rng.standard_normal((48, 7))
    for matrix in (rotation.Hadamard(1, 48), rotation.Hadamard(1, 24, level=True), rotation.Hadamard(7, 16)):
        np.testing.assert_allclose(matrix.turn_channels(x, -1) @ matrix.turn_channels(w, 0), x @ w, atol=1e-12)
    scale = rng.uniform(0.5, 2, 48)
    whole = rotation.Hadamard(1, 48)
    product = whole.turn_channels(x, 1) @ whole.turn_channels(w, 0, scale)
    np.testing.assert_allclose(product, x * scale @ w, atol=1e-12)
    parts = rotation.Hadamard(7, 16).turn_channels(x, -1)
    np.testing.assert_array_equal(parts[:, 16:32], rotation.Hadamard(7, 16).turn_channels(x[:, 16:32], -1))


def test_a_seed_stands_for_bytes_of_the_arrays_own_type() -> None:
    w = np.linspace(-1, 1, 80 * 70, dtype=np.float32).reshape(80, 70)
    turned = rotation.Hadamard(5, 80, level=True).turn_channels(w, 0)
    assert turned.dtype == np.float32
    assert hashlib.sha256(turned.tobytes()).hexdigest()[:16] == "12d5803da4c3845a"
    assert not np.array_equal(turned, rotation.Hadamard(6, 80, level=True).turn_channels(w, 0))


def test_a_row_times_a_matrix() -> None:
    rng = np.random.default_rng(0)
    row, matrix = rng.standard_normal(9), rng.standard_normal((9, 4))
    np.testing.assert_allclose(rotation.multiply_row(row, matrix), row @ matrix, atol=1e-12)
