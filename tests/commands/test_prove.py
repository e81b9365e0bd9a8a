"""Proofs as tables and JSON."""

import json
from dataclasses import replace

import pytest

from onnxq.annotate import WeightSums
from onnxq.backends.engine import BuildState, Kernel, Tensor
from onnxq.commands.prove import find_unmet_requirement
from onnxq.commands.results import show, write_json
from onnxq.engines.prove.proof import Build, NodeProof, Proof, Reduced, Requirement, SiteProof, SiteState
from onnxq.sites import Caution
from tests.report.kit import shown, warned

CONV = NodeProof(node="Conv_0", op="Conv", type="int8", kernel="Conv_0_quant", kind="QLinearConv")
PRODUCT = NodeProof(node="/head/attention/MatMul_7", op="MatMul", type="float32", kernel="MatMul_7", kind="MatMul")
NODES = (
    replace(CONV, types="uint8, int8 -> uint8"),
    replace(PRODUCT, types="float32 -> float32", reason="its input is not quantized"),
)
SITES = (
    SiteProof(site="x", role="activation", state=SiteState.FUSED, rule="ort.conv"),
    SiteProof(site="h", role="activation", state=SiteState.UNFUSED, rule="ort.matmul", reason="MatMul_7 reads floats"),
)
WEIGHTS = (Tensor(name="w", dtype="int8"), Tensor(name="s", dtype="float32"), Tensor(name="t", dtype="float32"))
KERNEL = Kernel(name="Conv_0_quant", kind="QLinearConv", nodes=("Conv_0",), weights=WEIGHTS)
KERNELS = (replace(KERNEL, inputs=(Tensor(name="x", dtype="uint8"),)),)
WEIGHT = WeightSums(node="Conv_0", op="Conv", weight="w", data="x", rows=1, all_rows=8, sums=1, all_sums=72)
PROOF = Proof(
    source="/models/m.q.onnx",
    build=Build(engine="ort", version="ONNX Runtime 1.31", state=BuildState.BUILT, seconds=0.31, shapes={}),
    kernels=KERNELS,
    nodes=NODES,
    sites=SITES,
    weights=(WEIGHT,),
    requirements=(Requirement(dtype="int8", pattern="Conv*", nodes=("Conv_0",), unmet=()),),
    warnings=(Caution("W112", "sizes were guessed"),),
)

TABLE = """\
m.q.onnx  (ONNX Runtime 1.31, built in 0.3 s)
node                      op      type     kernel       reads -> writes
Conv_0                    Conv    int8     QLinearConv  uint8, int8 -> uint8
/head/attention/MatMul_7  MatMul  float32  MatMul       float32 -> float32

pair  role        state      rule        why
h     activation  not fused  ort.matmul  MatMul_7 reads floats

node    op    weight  rows  sums
Conv_0  Conv  w        1/8  1/72

int8      Conv 1/1, MatMul 0/1
not int8  1 MatMul: its input is not quantized (/head/attention/MatMul_7)
pairs     2: 1 fused, 1 not fused
kernels   1: 1 QLinearConv
required  Conv*: 1/1 in int8
warning[W112]: sizes were guessed
warning[W107]: 1 of 8 rows of 1 weight can overflow 16-bit sums on x86 CPUs
without VNNI: Conv_0; `data=…` says how often they do
"""


def test_the_tables_at_80_columns() -> None:
    text = shown(show, PROOF)
    assert text == TABLE
    assert max(map(len, text.splitlines())) <= 80
    text = shown(show, PROOF, width=None, verbose=True)
    assert "int8, 2 float32" in text
    assert SiteState.FUSED in text


def test_weights_alone_are_counted_by_the_type_that_kernels_read() -> None:
    product = replace(NODES[1], type="uint4 weights, float32", computed=("float32",), stored="uint4", reason="")
    text = shown(show, replace(PROOF, nodes=(product, replace(NODES[1], node="other"))), width=None)
    assert "weights   MatMul 1/2 in uint4\n" in text
    assert "\nint8 " not in text


def test_a_refused_build_says_why_and_shows_the_last_lines() -> None:
    build = replace(REFUSED.build, log=tuple(f"line {k}" for k in range(9)))
    text = shown(show, Proof(source="m.onnx", build=build))
    assert "refused     node Foo_1: no plugin Foo" in text
    assert "line 3" in text
    assert "line 2" not in text
    assert "line 0" in shown(show, Proof(source="m.onnx", build=build), verbose=True)


def test_warnings_name_weights_that_saturate_unless_exact_sums_are_required() -> None:
    out, err = warned(show, PROOF, quiet=True)
    assert out == ""
    assert "warning[W112]: sizes were guessed" in err
    assert "warning[W107]: 1 of 8 rows of 1 weight can overflow" in err
    assert "W107" not in warned(show, replace(PROOF, require_exact=True), quiet=True)[1]


def test_json_is_keyed_by_name() -> None:
    found = json.loads(write_json(PROOF))
    assert (found["schema"], found["holds"], set(found["nodes"])) == (1, True, {"Conv_0", "/head/attention/MatMul_7"})
    assert found["sites"]["h"]["state"] == SiteState.UNFUSED
    assert found["counts"]["kernels"] == 1
    assert [one["code"] for one in found["warnings"]] == ["W112", "W107"]
    assert not json.loads(write_json(replace(PROOF, require_exact=True)))["holds"]


REFUSED = replace(PROOF, build=replace(PROOF.build, state=BuildState.REFUSED, reason="no plugin Foo", node="Foo_1"))
REDUCED = Reduced(nodes=("a",), ops=("Conv",), builds=3, seconds=1.0)
FLOAT = Requirement(dtype="int8", pattern="MatMul", nodes=(NODES[1].node,), unmet=(NODES[1].node,))


@pytest.mark.parametrize(("proof", "code", "subject", "cause", "fix"), [
    (REFUSED, "Q705", "node Foo_1", "refused: no plugin Foo", "`reduce=True` finds the smallest part"),
    (
        replace(REFUSED, build=replace(REFUSED.build, node="")),
        "Q705", "/models/m.q.onnx", "refused: no plugin Foo", "`out=…` keeps the log",
    ),
    (
        replace(REFUSED, build=replace(REFUSED.build, reduced=REDUCED)),
        "Q705", "node Foo_1", "refused", "`out=…` keeps the log",
    ),
    (
        replace(PROOF, requirements=(*PROOF.requirements, FLOAT)),
        "Q706", f"`require='int8'`: {NODES[1].node}", "not in int8 (1 in all)", "its input is not quantized",
    ),
    (replace(PROOF, require_exact=True), "Q707", "`require_exact=True`", "1 of 8 rows of 1 weight", "7-bit"),
])  # fmt: skip
def test_what_does_not_hold_is_an_error(proof: Proof, code: str, subject: str, cause: str, fix: str) -> None:
    error = find_unmet_requirement(proof)
    assert error is not None
    assert (error.code, error.subject) == (code, subject)
    assert cause in error.cause
    assert fix in error.fix


def test_of_many_nodes_some_are_named() -> None:
    nodes = tuple(replace(NODES[1], node=f"n{k}") for k in range(7))
    names = tuple(node.node for node in nodes)
    unmet = Requirement(dtype="int8", pattern="*", nodes=names, unmet=names)
    error = find_unmet_requirement(replace(PROOF, nodes=nodes, requirements=(unmet,)))
    assert error is not None
    assert error.subject.endswith(": n0, n1, n2, n3, n4 and 2 more")
    assert error.cause == "not in int8 (7 in all)"
    # What holds is none.
    assert find_unmet_requirement(PROOF) is None
    assert find_unmet_requirement(replace(PROOF, require_exact=True, weights=())) is None
