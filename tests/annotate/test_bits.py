"""Bits by every sign of the file, the arithmetic behind each, the order of trust, and the site of each pair."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxq.annotate import Origin, find_pairs
from onnxq.annotate.bits import count_bits, is_quantizer_clip, read_bits, read_clip_bits, read_noted_bits, read_numbers
from onnxq.annotate.find import find_chains, find_site
from onnxq.graph import get_index, name_nodes
from onnxq.sites import Edge, TensorId, is_within, split_scope
from onnxq.spec import ELEMENT_TYPES, find_element_type
from tests.annotate import models


@given(st.integers(2, 16), st.booleans(), st.data())
def test_the_narrowest_type_holds_both_ends_and_no_narrower_one_does(
    bits: int, signed: bool, data: st.DataObject
) -> None:
    def ends(width: int) -> tuple[int, int]:
        return (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)

    low = data.draw(st.integers(ends(bits)[0], 0))
    high = data.draw(st.integers(0, ends(bits)[1]))
    found = count_bits(low, high, signed=signed)
    assert ends(found)[0] <= low <= high <= ends(found)[1]
    assert found == 2 or low < ends(found - 1)[0] or high > ends(found - 1)[1]


@pytest.mark.parametrize(
    ("record", "bits"),
    [
        (None, None), ({}, None), ({"bits": 4}, 4), ({"bits": "12"}, 12), ({"bits": 64}, 64), ({"bits": 65}, None),
        ({"bits": 0}, None), ({"bits": -4}, None), ({"bits": "4.0"}, None), ({"bits": "٤٤٤"}, None),
    ],
)  # fmt: skip
def test_only_sane_notes_count(record: dict[str, object] | None, bits: int | None) -> None:
    assert read_noted_bits(record) == bits


def test_every_type_of_onnx_has_a_width_and_a_sign() -> None:
    for name in ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"):
        kind = find_element_type(name)
        assert (kind.bits, kind.signed, kind.is_float) == (int(name.strip("uint")), name[0] != "u", False)
    assert {name for name, kind in ELEMENT_TYPES.items() if kind.is_float} >= {"float", "double", "float8e4m3fn"}
    assert find_element_type("float8e5m2").bits == 8
    assert find_element_type("type99") == find_element_type("") == find_element_type("int8")
    known = {name.lower() for name in TensorProto.DataType.keys()}  # noqa: SIM118 - a protobuf enum, no mapping
    newer = {"int2", "uint2", "float6e2m3", "float6e3m2", "float8e8m0", "float4e2m1"}
    assert set(ELEMENT_TYPES) - newer <= known


def chain_of(model: onnx.ModelProto, number: int = 0):
    index = get_index(name_nodes(model))
    chain = list(find_chains(index))[number]
    return index, chain, read_numbers(index, chain)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_float_clip_says_its_width_also_in_half_precision(bits: int, signed: bool, dtype: type) -> None:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    model = clipped(dtype(0.37) * dtype(low), dtype(0.37) * dtype(high), dtype(0.37), signed)
    index, chain, numbers = chain_of(model)
    assert read_clip_bits(index, chain, numbers) == bits
    assert is_quantizer_clip(index, chain, numbers)
    assert read_bits(index, chain, numbers, noted=None, levels=None) == (bits, Origin.CLIP)
    assert read_bits(index, chain, numbers, noted=(6, Origin.PLAN), levels=None) == (6, Origin.PLAN)
    assert read_bits(index, chain, numbers, noted=(9, Origin.PLAN), levels=None) == (bits, Origin.CLIP)


def clipped(low: np.floating, high: np.floating, scale: np.floating, signed: bool) -> onnx.ModelProto:
    kind = int(helper.np_dtype_to_tensor_dtype(scale.dtype))
    pair = models.pair("c", "d", names=("q", "dq"))
    text = f"[cast] h = Cast <to={kind}>(x) [clip] c = Clip(h, lo, hi) {pair} [back] y = Cast <to=1>(d)"
    return models.model(text, 19, lo=low, hi=high, s=scale, z=np.int8(0) if signed else np.uint8(0))


@pytest.mark.parametrize(("low", "high"), [(-8.0, 7.4), (-8.5, 7.0), (-128.0, 127.0), (0.0, 7.0), (7.0, -8.0)])
def test_a_clip_to_other_bounds_is_the_networks(low: float, high: float) -> None:
    model = clipped(np.float32(low), np.float32(high), np.float32(1), True)
    index, chain, numbers = chain_of(model)
    assert read_clip_bits(index, chain, numbers) is None
    assert not is_quantizer_clip(index, chain, numbers)
    assert find_pairs(model)[0].clip == ""


def test_a_narrow_range_of_the_whole_type_is_a_clip_of_the_quantizer() -> None:
    index, chain, numbers = chain_of(clipped(np.float32(-127), np.float32(127), np.float32(1), True))
    assert read_clip_bits(index, chain, numbers) == 8


def found(make):
    index = get_index(name_nodes(make()))
    return index, list(find_chains(index))


@pytest.mark.parametrize(
    ("noted", "site"),
    [
        ("conv/in1", Edge("conv", 1)),
        ("nobody/in1", TensorId("nobody/in1")),
        ("onnx::Conv_497", TensorId("onnx::Conv_497")),
        ("If_0.then_branch::x", TensorId("If_0.then_branch::x")),
        (None, TensorId("x")),
        ("", TensorId("x")),
    ],
)
def test_a_noted_site_is_read_with_the_scopes_of_the_model(noted: str | None, site: object) -> None:
    index, (first, *_) = found(models.two_widths)
    assert find_site(index, first, noted) == site


def test_a_scope_is_one_where_the_model_has_it() -> None:
    index, all_chains = found(models.branches)
    assert "If_0.then_branch" in index.scopes
    assert find_site(index, all_chains[0], "If_0.then_branch::onnx::x") == TensorId("onnx::x", "If_0.then_branch")


words = st.text(st.sampled_from("ab:/."), min_size=1, max_size=6)


@given(words, st.sets(words, max_size=4), words)
def test_what_str_writes_is_split_again(name: str, scopes: set[str], scope: str) -> None:
    """Names and scopes full of colons: the longest scope that the model has is taken."""
    text = str(TensorId(name, scope))
    got_scope, got_name = split_scope(text, scopes | {scope})
    assert str(TensorId(got_name, got_scope)) == text
    assert len(got_scope) >= len(scope)
    assert split_scope(name, ()) == ("", name)


@pytest.mark.parametrize(
    ("scope", "outer", "inside"),
    [("", "", True), ("a", "", True), ("a", "a", True), ("a/b", "a", True), ("ab", "a", False), ("a", "a/b", False)],
)
def test_scopes_within_each_other(scope: str, outer: str, inside: bool) -> None:
    assert is_within(scope, outer) is inside
