"""Tables of embeddings as they are written: the graph, and its numbers, which are those of `numerics`."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.numerics import fake_quant, weight_qparams
from onnxq.runtime import Session, optimize_graph
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, QuantSpec
from tests.tables import held, make_table, model, ops, quantize, tokens, words

ROWWISE = QuantSpec(granularity=PerChannel(0))


def run(proto: onnx.ModelProto, ids: np.ndarray, *, optimize: bool) -> np.ndarray:
    return np.asarray(Session(proto, optimize=optimize).run({"ids": ids})[proto.graph.output[0].name])


def test_the_graph_of_a_lookup() -> None:
    proto = quantize(model("y = Gather(w, ids)", w=make_table()), embeddings="int8").model
    lines = [(n.op_type, n.name, list(n.input), list(n.output)) for n in proto.graph.node]
    assert sorted(lines, key=lambda line: line[1]) == [
        ("Gather", "y/Gather", ["w/quantized", "ids"], ["y/Gather/in0/quantized"]),
        ("Cast", "y/Gather/in0/Cast", ["y/Gather/in0/quantized"], ["y/Gather/in0/row"]),
        ("Mul", "y/Gather/in0/Mul", ["y/Gather/in0/row", "y/Gather/in0/row_scale/column"], ["y"]),
        ("Gather", "y/Gather/in0/row_scale/Gather", ["w/scale", "ids"], ["y/Gather/in0/row_scale"]),
        (
            "Unsqueeze", "y/Gather/in0/row_scale/Unsqueeze",
            ["y/Gather/in0/row_scale", "y/Gather/in0/row_scale/axis"], ["y/Gather/in0/row_scale/column"],
        ),
    ]  # fmt: skip
    stored = held(proto)
    assert (stored["w/quantized"].dtype, stored["w/quantized"].shape) == (np.int8, (300, 48))
    assert stored["w/scale"].shape == (300,)
    assert "w" not in stored


def test_the_graph_of_a_lookup_in_4_bits_keeps_the_opset() -> None:
    proto = quantize(words(), embeddings="int4").model
    node = proto.graph.node[0]
    assert (node.op_type, node.name) == ("GatherBlockQuantized", "e/Gather")
    assert {a.name: a.i for a in node.attribute} == {"block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    # INT4 is known from IR version 10 on; opset 21, which brings it along, makes ORT refuse other pairs.
    assert (proto.opset_import[0].version, proto.ir_version) == (17, 10)


@settings(max_examples=6)
@given(st.integers(1, 90), st.integers(1, 70), st.sampled_from([0, 16, 32, 64, 128]), st.integers(0, 99))
def test_rows_are_those_of_the_reference_to_the_bit(rows: int, width: int, block: int, seed: int) -> None:
    table = make_table(rows, width, seed)
    table[rng_row := seed % rows] = 0
    spec = QuantSpec(bits=4, storage="int4", granularity=PerBlock(1, block)) if block else ROWWISE
    rule = {"bits": 4, "block_size": block} if block else {"bits": 8}
    proto = model("y = Gather(w, ids)", w=table)
    data = tokens(4, rows)
    made = quantize(proto, data, rules=[{"tensor": "w", "set": rule}], embeddings="float").model
    wanted = fake_quant(table, weight_qparams(table, spec, observer=ObserverSpec("mse" if block else "minmax")), spec)
    ids = np.append(np.arange(-rows, rows), rng_row)[None]
    for optimize in (False, True):
        np.testing.assert_array_equal(run(made, ids, optimize=optimize), wanted[ids])


def test_several_lookups_share_one_table() -> None:
    proto = quantize(model("e = Gather(w, ids) f = Gather(w, ids) y = Sub(e, f)", w=make_table())).model
    assert ops(proto.graph).count("Mul") == 2
    assert [name for name, value in held(proto).items() if value.size > 300] == ["w/quantized"]
    assert not run(proto, np.array([[3, 4]]), optimize=True).any()


@pytest.mark.parametrize("embeddings", ["int8", "int4"])
def test_lookups_in_bodies_read_the_table_outside(embeddings: str) -> None:
    body = """y = If (c) <
        then_branch = t() => (float[N,S,D] a) { a = Gather(w, ids) },
        else_branch = u() => (float[N,S,D] b) { q = Gather(w, ids) b = Neg(q) }>"""
    proto = model(body, more=", bool c", w=make_table())
    made = quantize(proto, {**tokens(), "c": np.arange(8) % 2 == 0}, embeddings=embeddings).model
    assert "w/quantized" in {tensor.name for tensor in made.graph.initializer}
    ids, session = tokens()["ids"][0], Session(made)
    yes, no = (session.run({"ids": ids, "c": np.array(c)})["y"] for c in (True, False))
    np.testing.assert_array_equal(yes, -no)


def test_lookups_in_a_loop() -> None:
    body = """y = Loop (n, , z) <
        b = t(int64 i, bool c, float[1,7,48] a) => (bool d, float[1,7,48] s) {
            d = Identity(c) q = Gather(w, ids) s = Add(q, a) }>"""
    proto = model(body.replace("b =", "body ="), w=make_table(), n=np.array(2), z=np.zeros((1, 7, 48), np.float32))
    made = quantize(proto).model
    table, ids = make_table(), tokens()["ids"][0]
    wanted = fake_quant(table, weight_qparams(table, ROWWISE), ROWWISE)[ids]
    np.testing.assert_array_equal(run(made, ids, optimize=True), wanted + wanted)


def test_rows_of_a_float16_table_are_computed_in_float32() -> None:
    table = make_table().astype(np.float16)
    wide, ids = table.astype(np.float32), tokens()["ids"][0]
    wanted = fake_quant(wide, weight_qparams(wide, ROWWISE), ROWWISE)[ids].astype(np.float16)
    # The first computes in float16 and is planned in float32, the second only looks up.
    for body in ("e = Gather(w, ids) y = Abs(e)", "y = Gather(w, ids)"):
        made = quantize(model(body, "float16[A,B,C] y", w=table)).model
        assert held(made)["w/quantized"].dtype == np.int8
        found = run(made, ids, optimize=False)
        np.testing.assert_array_equal(found, np.abs(wanted) if "Abs" in body else wanted)


def test_rows_may_be_float16() -> None:
    made = quantize(words(), high_precision="float16").model
    assert held(made)["w/scale"].dtype == np.float16
    assert len(run(made, tokens()["ids"][0], optimize=True))


def tied(product: str, rows: int = 3000) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    proto = model(f"e = Gather(w, ids) h = Relu(e) {product}", w=make_table(rows, 256) / 4)
    return proto, tokens(8, rows, 16)


@pytest.mark.parametrize(
    ("config", "kernel"), [("ort-int8", "MatMulIntegerToFloat"), ("ort-dynamic", "DynamicQuantizeMatMul")]
)
def test_a_table_and_its_transpose_are_stored_once(config: str, kernel: str) -> None:
    made = quantize(*tied("t = Transpose(w) y = MatMul(h, t)"), config=config)
    assert [name for name, value in held(made.model).items() if value.size > 3000] == ["w/quantized"]
    sites = {str(site.site): site for site in made.plan.sites}
    assert sites["w"].group == sites["t"].group == "t"
    np.testing.assert_array_equal(sites["w"].qparams.scale, sites["t"].qparams.scale)
    ids = tokens()["ids"][0]
    slow, fast = (run(made.model, ids, optimize=optimize) for optimize in (False, True))
    np.testing.assert_allclose(slow, fast, rtol=0, atol=1e-3 * np.abs(slow).max())
    assert kernel in ops(optimize_graph(made.model).graph)


def test_weights_alone_have_their_own_copy_for_their_kernel() -> None:
    made = quantize(*tied("t = Transpose(w) y = MatMul(h, t)", rows=300), config="ort-int8-weights")
    assert sorted(n for n, v in held(made.model).items() if v.size > 3000) == ["t/quantized", "w/quantized"]


def test_a_gemm_reads_the_integers_of_the_table_itself() -> None:
    proto = model("i = Flatten(ids) j = Squeeze(i) e = Gather(w, j) h = Relu(e) y = Gemm<transB=1>(h, w)",
                  "float[A,B] y", w=make_table(3000, 256) / 4)  # fmt: skip
    force = [{"op": "Gemm", "set": {"quantize": True}}]
    made = quantize(proto, tokens(8, 3000, 16), embeddings="int8", rules=force)
    (site,) = (site for site in made.plan.sites if str(site.site) == "w")
    assert [edge.node for edge in site.consumers] == ["y/Gemm", "e/Gather"]
    assert [name for name, value in held(made.model).items() if value.size > 3000] == ["w/quantized"]
