"""Chains of nodes as tools write them, and the identity of each pair's site."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.annotate.find import find_chains, find_site, list_operators, list_readers
from onnxq.graph import get_index, name_nodes
from onnxq.sites import Edge, TensorId, is_within, split_scope
from tests.annotate import models


def found(make):
    index = get_index(name_nodes(make()))
    return index, list(find_chains(index))


def test_a_chain_holds_its_clips_and_begins_at_the_float_tensor() -> None:
    index, (first, weight, bias, middle, last) = found(models.two_widths)
    assert [node.op_type for node in middle.nodes] == ["Clip", "QuantizeLinear", "DequantizeLinear"]
    assert middle.source == TensorId("c")
    assert (weight.quantize, bias.quantize) == (None, None)
    assert weight.source == TensorId("w_quantized")
    assert [list_operators(index, chain) for chain in (first, weight, middle, last)] == [
        ("Conv",), ("Conv",), ("Relu",), ("Relu",),
    ]  # fmt: skip
    assert list_readers(index, first) == (Edge("conv", 0),)
    assert last.last is last.dequantize


def test_an_integer_clip_belongs_to_its_pair_alone() -> None:
    _, (data, weight) = found(models.qcdq)
    assert data.inner is not None
    assert weight.inner is not None
    assert data.quantize is not None
    assert (data.source, weight.source) == (TensorId("x"), TensorId("w_int"))


def test_a_quantize_node_alone_is_a_chain() -> None:
    _, (lone,) = found(models.lone_nodes)
    assert (lone.dequantize, lone.inner) == (None, None)
    assert lone.last.name == "q"


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
