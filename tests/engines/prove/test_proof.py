"""Proofs as values: what is looked up in them, and what counts."""

from collections import Counter
from dataclasses import replace

import pytest

from onnxq.annotate import WeightSums
from onnxq.backends.engine import BuildState, Kernel, Tensor
from onnxq.engines.prove.proof import Build, Change, NodeProof, Proof, SiteProof, SiteState

BUILD = Build(engine="ort", version="ONNX Runtime 1", state=BuildState.BUILT, shapes={})
TYPES = {"a": "int8", "b": "float32", "c": "int8", "d": "int8"}
NODES = tuple(NodeProof(node=name, op="MatMul" if name == "d" else "Conv", type=kind) for name, kind in TYPES.items())
PROOF = Proof(
    source="m.onnx",
    build=BUILD,
    kernels=tuple(Kernel(name=f"k{k}", kind=kind) for k, kind in enumerate(("QLinearConv", "Add", "QLinearConv"))),
    nodes=NODES,
    sites=(SiteProof(site="x", role="activation", state=SiteState.PARTLY),),
)


SUMS = WeightSums(node="a", op="Conv", weight="w", data="uint8", rows=3, all_rows=8, sums=3, all_sums=64)
NONE = replace(SUMS, rows=0, sums=0)


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
    loose = replace(PROOF, weights=(SUMS, NONE, replace(SUMS, exact="computed in float32")))
    assert loose.saturating == (SUMS,)
    assert loose.holds
    assert not replace(loose, require_exact=True).holds
    assert replace(loose, weights=(NONE,), require_exact=True).holds


@pytest.mark.parametrize(("before", "after"), [("int8", "float32"), ("", "int8"), ("int8", "")])
def test_changes_in_words(before: str, after: str) -> None:
    change = Change(kind="node", name="c", before=before, after=after)
    assert str(change) == f"node c: {before or 'absent'} -> {after or 'absent'}"
