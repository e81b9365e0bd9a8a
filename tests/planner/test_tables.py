"""Which constants are tables of embeddings, and which of them are quantized."""

from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.planner import EMBEDDING_ROWS
from onnxq.spec import PerBlock, PerChannel, QuantSpec
from tests.tables import make_table, model, tokens, words


def plan(proto: onnx.ModelProto, config: str = "ort-int8", **overrides: Any) -> onnxq.Plan:
    return onnxq.make_plan(proto, None, config, overrides={"effort": "fast", **overrides})


def tables(found: onnxq.Plan) -> list[str]:
    return [str(site.site) for site in found.sites if site.rule == EMBEDDING_ROWS]


def reasons(found: onnxq.Plan, code: str) -> list[str]:
    return [one.reason for one in (*found.refusals, *found.left_float) if one.code == code]


@pytest.mark.parametrize("config", ["ort-int8", "ort-int8-weights", "ort-int4-weights", "ort-w4a8"])
def test_a_table_that_is_most_of_the_file_is_int8_in_every_mode(config: str) -> None:
    (site,) = (site for site in plan(words(), config).sites if site.rule == EMBEDDING_ROWS)
    assert site.spec == QuantSpec(granularity=PerChannel(0))
    assert [str(edge) for edge in site.consumers or ()] == ["e/Gather/in0"]


@pytest.mark.parametrize(
    ("embeddings", "expected"), [("float", []), ("auto", []), ("int8", ["w"]), ("int4", ["w"])]
)  # fmt: skip
def test_a_table_beside_larger_weights_waits_to_be_asked_for(embeddings: str, expected: list[str]) -> None:
    proto = model("e = Gather(w, ids) h = Abs(e) y = Mul(h, m)", w=make_table(), m=np.ones((400, 1, 48), np.float32))
    assert tables(plan(proto, embeddings=embeddings)) == expected


@pytest.mark.parametrize("config", ["ort-int8-weights", "ort-int4-weights"])
def test_weights_alone_have_tables_of_8_bits_whatever_their_share(config: str) -> None:
    large = np.random.default_rng(0).standard_normal((48, 3000)).astype(np.float32)
    proto = model("e = Gather(w, ids) h = Abs(e) y = MatMul(h, m)", w=make_table(), m=large)
    assert tables(plan(proto, config)) == ["w"]
    assert tables(plan(proto, config, embeddings="float")) == []
    assert tables(plan(proto)) == []


def test_weights_count_with_the_bits_that_they_get() -> None:
    """As large as the table, but in 8 bits a quarter of it."""
    large = np.random.default_rng(0).standard_normal((48, 300)).astype(np.float32)
    proto = model("e = Gather(w, ids) h = Abs(e) y = MatMul(h, m)", w=make_table(), m=large)
    assert tables(plan(proto, "ort-int8-weights")) == ["w"]
    assert tables(plan(proto, rules=[{"op": "MatMul", "set": {"float": True}}])) == []


def test_small_tables_beside_large_ones_stay_float() -> None:
    body = "e = Gather(w, ids) f = Gather(p, ids) y = Add(e, f)"
    assert tables(plan(model(body, w=make_table(2000), p=make_table(90)))) == ["w"]
    assert tables(plan(model(body, w=make_table(2000), p=make_table(90)), embeddings="int8")) == ["w"]
    rule = {"tensor": "p", "set": {"quantize": True}}
    assert tables(plan(model(body, w=make_table(2000), p=make_table(90)), rules=[rule])) == ["w", "p"]
    assert tables(plan(model("y = Gather(w, ids)", w=make_table(20)), embeddings="int8")) == []


@pytest.mark.parametrize(
    "proto",
    [
        model("y = Gather<axis=1>(w, ids)", w=make_table()),
        model("y = Gather(w, ids)", "int64[A,B,C] y", w=np.ones((300, 48), np.int64)),
        model("s = Shape(ids) y = Gather(s, ids)", "int64[A,B] y"),
        model("y = Gather(w, ids)", w=np.ones((300, 48, 2), np.float32)),
    ],
    ids=["other axis", "integers", "shape", "three axes"],
)
def test_other_gathers_are_left_alone(proto: onnx.ModelProto) -> None:
    found = plan(proto, embeddings="int8")
    assert not tables(found)
    assert not (*found.refusals, *found.left_float)


def test_rules_name_tables() -> None:
    rule = {"tensor": "w", "set": {"bits": 4, "block_size": 16}}
    (site,) = plan(words(), rules=[rule], embeddings="float").sites
    assert site.spec == QuantSpec(bits=4, storage="int4", granularity=PerBlock(1, 16))
    assert (site.observer.name, site.reason.endswith("tensor=w: {'bits': 4, 'block_size': 16}")) != ("minmax", None)
    left = plan(words(), rules=[{"node": "e/Gather", "set": {"float": True}}])
    assert not tables(left)
    assert reasons(left, "F101")
    assert tables(plan(words(), rules=[{"role": "weight", "set": {"bits": 4}}])) == ["w"]


@pytest.mark.parametrize("wish", [{"bits": 5}, {"bits": 4, "block_size": 24}, {"scheme": "asymmetric"}])
def test_a_type_without_a_kernel_is_refused(wish: dict[str, Any]) -> None:
    found = plan(words(), rules=[{"tensor": "w", "set": wish}])
    assert not tables(found)
    assert len(reasons(found, "R103")) == 1


def test_targets_that_take_float_tables_only() -> None:
    found = plan(words(), "trt-int8")
    assert not tables(found)
    assert reasons(found, "F109") == ["trt looks embeddings up in float tables only"]
    assert reasons(plan(words(), "trt-int8", embeddings="int8"), "R103")
    assert reasons(plan(words(), "virtual-int8", embeddings="int4"), "R103")


def test_a_table_that_is_read_in_float_too_is_stored_once() -> None:
    proto = model("e = Gather(w, ids) f = MatMul(z, w) y = Add(e, f)", more=", float[1,1,300] z", w=make_table())
    found = plan(proto, embeddings="int8")
    assert not tables(found)
    (reason,) = reasons(found, "F109")
    assert "stored twice" in reason


def test_rows_that_lose_too_much_stay_float() -> None:
    """One value beside a thousand of less than half a step, which all become zero."""
    table = np.full((300, 1024), 0.45 / 127, np.float32)
    table[:, 0] = 1
    proto = model("e = Gather(w, ids) y = Abs(e)", w=table)
    found = plan(proto)
    assert not tables(found)
    assert "30 are asked" in reasons(found, "F109")[0]
    assert tables(plan(proto, embeddings="int8")) == ["w"]
    # A few such rows among others are no reason.
    table[3:] = make_table(297, 1024)
    assert tables(plan(model("e = Gather(w, ids) y = Abs(e)", w=table))) == ["w"]


def test_a_transpose_that_is_promoted_leaves_the_table_its_integers() -> None:
    proto = model("e = Gather(w, ids) h = Relu(e) t = Transpose(w) y = MatMul(h, t)", w=make_table(1000, 256) / 4)
    settings = {"effort": "fast", "latency": False, "min_sqnr": 36}
    made = onnxq.quantize(proto, tokens(8, 1000, 16), overrides=settings)
    assert [(str(site.site), site.group) for site in made.plan.sites] == [("w", "")]
    again = onnxq.apply(proto, made.plan, overrides={"latency": False})
    assert again.model.SerializeToString() == made.model.SerializeToString()


def test_the_plan_is_carried_out_again() -> None:
    proto = words()
    for embeddings in ("int8", "int4"):
        settings = {"effort": "fast", "latency": False, "embeddings": embeddings}
        made = onnxq.quantize(proto, tokens(), overrides=settings)
        again = onnxq.apply(proto, made.plan, overrides={"latency": False})
        assert again.model.SerializeToString() == made.model.SerializeToString()
