"""The pairs that a model came with, as planning sees them: sites with numbers, and a view without them."""

import base64
import zlib

import numpy as np
import pytest

from onnxq.annotate import find_existing, read_plan_note
from onnxq.annotate.existing import describe_quantized, is_guard
from onnxq.emit.model import pack_plan
from onnxq.graph import get_index, name_nodes
from onnxq.plan import Plan
from onnxq.sites import Edge, Role, TensorId
from tests.annotate import models


def existing(make):
    proto = name_nodes(make())
    before = proto.SerializeToString(deterministic=True)
    found = find_existing(proto)
    assert proto.SerializeToString(deterministic=True) == before
    return found


def test_a_float_model_has_none() -> None:
    found = existing(models.float_conv)
    assert found.view is None
    assert (found.by_tensor, found.by_edge, found.constants, found.stand_ins) == ({}, {}, (), frozenset())


def test_pairs_become_sites_with_the_numbers_of_the_file() -> None:
    found = existing(models.two_widths)
    site = found.by_tensor[TensorId("x")]
    assert (float(site.qparams.scale), int(site.qparams.zero_point)) == (np.float32(0.02), 128)
    assert (site.spec.bits, site.spec.storage, site.dequantize) == (8, "uint8", "in_dq")
    assert found.by_edge[Edge("conv", 0)] == site
    narrow = found.by_tensor[TensorId("c")]
    assert (narrow.spec.bits, narrow.spec.storage) == (4, "int8")
    assert {one.role for one in found.constants} == {Role.WEIGHT, Role.BIAS}
    assert found.weighted == {"conv"}
    assert Edge("conv", 1) in found.direct


def test_a_scale_computed_at_run_time_is_shared_with_nobody() -> None:
    found = existing(models.lone_nodes)
    assert (found.by_tensor, found.by_edge) == ({}, {})
    assert found.view is None or any(node.op_type == "QuantizeLinear" for node in found.view.graph.node)


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_shared_with_nobody(scale: float) -> None:
    proto = models.two_widths()
    name = next(node for node in proto.graph.node if node.name == "in_dq").input[1]
    held = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    held.CopyFrom(models.tensor(name, np.float32(scale)))
    found = find_existing(name_nodes(proto))
    assert TensorId("x") not in found.by_tensor
    assert all(site.qparams is None or np.isfinite(site.qparams.scale).all() for site in found.sites)


def test_halves_that_differ_stay_in_the_view() -> None:
    proto = models.two_widths()
    proto.graph.initializer.append(models.tensor("other", np.float32(0.5)))
    next(node for node in proto.graph.node if node.name == "in_dq").input[1] = "other"
    found = find_existing(name_nodes(proto))
    assert TensorId("x") not in found.by_tensor
    assert {"in_q", "in_dq"} <= {node.name for node in found.view.graph.node}


PAIR = {"s": np.float32(0.1), "z": np.int8(0)}


def test_two_pairs_with_the_same_numbers_are_one_site() -> None:
    text = f"{models.pair('x', 'd1')} {models.pair('x', 'd2')} [add] y = Add(d1, d2)"
    found = existing(lambda: models.model(text, **PAIR))
    assert len({id(site) for site in found.by_edge.values()}) == 1
    assert set(found.by_edge) == {Edge("add", 0), Edge("add", 1)}


def test_readers_behind_a_guard_read_the_pair_too() -> None:
    text = f"{models.pair('x', 'd')} [guard] g = Clip(d) [neg] y = Neg(g)"
    proto = name_nodes(models.model(text, **PAIR))
    assert [node.name for node in get_index(proto).nodes if is_guard(node)] == ["guard"]
    assert Edge("neg", 0) in find_existing(proto).by_edge


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0, 0), ""),
        ((1, 0), "already quantized: 1 pair kept"),
        ((2, 1), "already quantized: 2 pairs and 1 operator kept"),
        ((0, 3), "already quantized: 3 operators kept"),
    ],
)
def test_the_message_counts_both_kinds(counts: tuple[int, int], text: str) -> None:
    assert describe_quantized(*counts) == text


def pack(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


CUT = pack(bytes(range(256)) * 9)[:-8]


@pytest.mark.parametrize(
    "text", [None, "", "{", "abcd", CUT, pack(b"[]"), pack(b"\xff"), '{"schema": 1}', '{"schema": 99}', "[]"]
)
def test_a_note_that_is_no_plan_is_none(text: str | None) -> None:
    proto = models.two_widths()
    if text is not None:
        proto.metadata_props.add(key="onnxq.plan", value=text)
    assert read_plan_note(proto) is None


def test_a_plan_is_read_as_it_is_packed_and_as_plain_json() -> None:
    """Files of before hold it plain."""
    plan = Plan(
        model="m", target="ort", topology="t", weights="w", nodes={f"model/layer/{k}/Conv": "1" for k in range(99)}
    )
    packed = pack_plan(plan)
    plain = zlib.decompress(base64.b64decode(packed)).decode()
    assert len(packed) < len(plain) / 4
    for text in (packed, plain):
        proto = models.two_widths()
        proto.metadata_props.add(key="onnxq.plan", value=text)
        assert read_plan_note(proto) == plan
