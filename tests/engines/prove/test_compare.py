"""Two proofs side by side: what changed, by the names of nodes, weights and sites; and which files are no proof."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxq.annotate import WeightSums
from onnxq.backends.engine import BuildState, Kernel
from onnxq.engines.prove.proof import Build, NodeProof, Proof, SiteProof, SiteState, find_changes, read_proof
from onnxq.errors import DataError

BUILD = Build(engine="ort", version="ONNX Runtime 1.31.0", state=BuildState.BUILT, capability="", shapes={})
SUMS = WeightSums(node="a", op="Conv", weight="w", data="uint8", rows=3, all_rows=8, sums=5, all_sums=64)
PROOF = Proof(
    source="m.onnx",
    build=BUILD,
    kernels=(Kernel(name="k", kind="QLinearConv"), Kernel(name="l", kind="Add")),
    nodes=(NodeProof(node="a", op="Conv", type="int8"), NodeProof(node="b", op="Conv", type="float32")),
    sites=(SiteProof(site="x", role="activation", state=SiteState.FUSED),),
    weights=(SUMS,),
)
DOCUMENT: Mapping[str, Any] = {
    "build": {"engine": "ort", "version": "ONNX Runtime 1.31.0", "capability": "", "state": "built", "more": 1},
    "nodes": {"a": {"type": "int8"}, "b": {"type": "float32"}},
    "sites": {"x": {"state": "fused"}},
    "kernels": [{"name": "k"}, {"name": "l"}],
    "weights": [{"weight": "w", "rows": 3, "all_rows": 8}],
}


def changes(folder: Path, after: Proof, **edits: Any) -> list[str]:
    path = folder / "before.json"
    path.write_text(json.dumps({**DOCUMENT, **edits}))
    return [str(change) for change in find_changes(read_proof(path), after)]


def test_every_kind_of_change_in_the_models_order(tmp_path: Path) -> None:
    after = replace(
        PROOF,
        build=replace(BUILD, version="ONNX Runtime 1.32.0", state=BuildState.REFUSED),
        kernels=PROOF.kernels[:1],
        nodes=(NodeProof(node="c", op="Conv", type="int8"), NodeProof(node="b", op="Conv", type="int8")),
        sites=(SiteProof(site="x", role="activation", state=SiteState.PARTLY),),
        weights=(replace(SUMS, rows=0),),
    )
    assert changes(tmp_path, after) == [
        "build version: ONNX Runtime 1.31.0 -> ONNX Runtime 1.32.0",
        "build state: built -> refused",
        "count kernels: 2 -> 1",
        "node c: absent -> int8",
        "node b: float32 -> int8",
        "node a: int8 -> absent",
        "weight w: 3 of 8 rows can overflow -> 0 of 8 rows can overflow",
        "site x: fused -> partly",
    ]


def test_weights_that_a_kernel_computes_exactly_have_no_rows(tmp_path: Path) -> None:
    exact = replace(PROOF, weights=(replace(SUMS, exact="computed in float32"),))
    assert changes(tmp_path, exact) == ["weight w: 3 of 8 rows can overflow -> 0 of 8 rows can overflow"]
    both = [{"weight": "w", "rows": 3, "all_rows": 8, "exact": "computed in float32"}]
    assert changes(tmp_path, exact, weights=both) == []


def test_the_same_proof_has_no_changes_and_one_from_before_weights_were_counted_none_of_them(tmp_path: Path) -> None:
    assert changes(tmp_path, PROOF) == []
    assert changes(tmp_path, PROOF, weights=None) == []
    assert changes(tmp_path, replace(PROOF, weights=()), weights=None) == []
    assert changes(tmp_path, replace(PROOF, kernels=()), kernels=[]) == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "not JSON"),
        ("[]", "is not the JSON of a proof"),
        ("{}", "is not the JSON of a proof"),
        (json.dumps({**DOCUMENT, "nodes": []}), "is not the JSON of a proof"),
        (json.dumps({**DOCUMENT, "sites": {"x": {}}}), "sites.x.state"),
        (json.dumps({**DOCUMENT, "weights": [{"weight": "w", "rows": -1}]}), "weights[0].rows"),
        ("{", "not JSON"),
        ("\0", "not JSON"),
        ("[" * 5000, "not JSON: recursion limit"),
        ("9" * 5000, "not JSON: number out of range"),
        ('{"build": 1, "nodes": {}, "sites": {}}', "is not the JSON of a proof"),
        ('{"build": {}, "nodes": {}, "sites": {}, "kernels": null}', "must be a list"),
        ('{"build": {}, "nodes": {"a": 3}, "sites": {}}', "must be a mapping"),
        ('{"build": {"state": []}, "nodes": {}, "sites": {}}', "must be a valid string"),
        ('{"build": {}, "nodes": {}, "sites": {}, "weights": [3]}', "must be a mapping"),
    ],
)
def test_other_files_are_named_with_the_entry(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"\[Q217\]") as caught:
        read_proof(path)
    assert cause in str(caught.value)
    assert "write it with `onnxq prove`, as JSON" in caught.value.fix
