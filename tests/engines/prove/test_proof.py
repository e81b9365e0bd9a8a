"""Proofs as values: what is looked up in them, and what counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from onnxq.annotate import WeightSums
from onnxq.backends.engine import BuildState, Kernel, Tensor
from onnxq.engines.prove.proof import Build, Change, NodeProof, Proof, SiteProof, SiteState

BUILD = Build(engine="ort", version="ONNX Runtime 1", state=BuildState.BUILT, shapes={})
NODES = (
    NodeProof(node="a", op="Conv", type="int8"),
    NodeProof(node="b", op="Conv", type="float32"),
    NodeProof(node="c", op="Conv", type="int8"),
    NodeProof(node="d", op="MatMul", type="int8"),
)
PROOF = Proof(
    source="m.onnx",
    build=BUILD,
    kernels=tuple(Kernel(name=f"k{k}", kind=kind) for k, kind in enumerate(("QLinearConv", "Add", "QLinearConv"))),
    nodes=NODES,
    sites=(SiteProof(site="x", role="activation", state=SiteState.PARTLY),),
)


def sums(rows: int, exact: str = "") -> WeightSums:
    return WeightSums(
        node="a", op="Conv", weight="w", data="uint8", rows=rows, all_rows=8, sums=rows, all_sums=64, exact=exact
    )


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((2, 3), 6), ((-1, 3), 3), ((0, 4), 4)])
def test_dynamic_axes_count_once(shape: tuple[int, ...], size: int) -> None:
    assert Tensor(name="t", dtype="int8", shape=shape).size == size


def test_nodes_sites_and_kernels_by_name_and_number() -> None:
    assert PROOF.node("b") is NODES[1]
    assert PROOF.site("x").state is SiteState.PARTLY
    for look in (PROOF.node, PROOF.site):
        with pytest.raises(KeyError):
            look("nobody")
    assert PROOF.by_op() == {"Conv": Counter({"int8": 2, "float32": 1}), "MatMul": Counter({"int8": 1})}
    assert PROOF.by_kind() == Counter({"QLinearConv": 2, "Add": 1})


def test_an_engine_is_there_or_not() -> None:
    assert PROOF.built
    assert PROOF.holds
    for state in BuildState:
        found = replace(PROOF, build=replace(BUILD, state=state))
        assert found.built is found.holds is (state is BuildState.BUILT)


def test_sums_count_where_they_must_be_exact() -> None:
    loose = replace(PROOF, weights=(sums(3), sums(0), sums(2, exact="computed in float32")))
    assert loose.saturating == (sums(3),)
    assert loose.holds
    assert not replace(loose, require_exact=True).holds
    assert replace(loose, weights=(sums(0),), require_exact=True).holds


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("int8", "float32", "node c: int8 -> float32"),
        ("", "int8", "node c: absent -> int8"),
        ("int8", "", "node c: int8 -> absent"),
    ],
)
def test_changes_in_words(before: str, after: str, text: str) -> None:
    assert str(Change(kind="node", name="c", before=before, after=after)) == text
