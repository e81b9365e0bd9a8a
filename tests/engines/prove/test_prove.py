"""Proofs as values, the engine they are of, options refused before anything is built, and the folder of results."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.annotate import WeightSums
from onnxq.backends import find_engine
from onnxq.backends.engine import BuildState, Kernel, Tensor
from onnxq.config import ProveConfig
from onnxq.engines.prove.proof import Build, NodeProof, Proof, SiteProof, SiteState
from onnxq.engines.prove.prove import ProveRequest, open_output_folder, prove_model
from onnxq.engines.prove.reduce import Parts, find_smallest_failure
from onnxq.errors import ConfigError, OutputError
from onnxq.graph import GraphIndex, infer_shapes
from tests.engines import kit
from tests.engines.kit import matmul


@pytest.mark.parametrize(("options", "code", "words"), [
    pytest.param({"engine": "tensort"}, "Q312", "engine 'tensort': is not known", id="an unknown engine"),
    pytest.param({"engine": "ort", "compute_capability": "8.6"}, "Q317", "ort builds for this machine",
                 id="a capability for ONNX Runtime"),
    pytest.param({"engine": "tensorrt", "compute_capability": "8.6"}, "Q317", "tensorrt builds for this machine",
                 id="a capability for TensorRT"),
    pytest.param({"engine": "tensorrt-rtx", "compute_capability": "Ampere"}, "Q304", "is none",
                 id="a capability in words"),
    pytest.param({"engine": "tensorrt-rtx", "compute_capability": "8"}, "Q304", "write it as 8.6",
                 id="half a capability"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused_before_a_build(options, code, words):
    with pytest.raises(ConfigError, match=words) as caught:
        prove_model(matmul(), ProveRequest(options=ProveConfig(**options)))
    assert caught.value.code == code


def test_an_earlier_proof_that_cannot_be_read_is_found_out_first(tmp_path: Path):
    # Before the options, and so before minutes of building.
    missing = tmp_path / "proof.json"
    with pytest.raises(Exception, match=r"proof\.json"):
        prove_model(matmul(), ProveRequest(options=ProveConfig(engine="tensort", compare=str(missing))))


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("ort", {"build.log", "optimized.onnx"}),
        ("tensorrt", {"build.log", "layers.txt", "model.engine"}),
        ("tensorrt-rtx", {"build.log", "layers.txt", "model.engine"}),
    ],
)
def test_files_of_a_build_have_names_for_people(engine, names):
    assert set(find_engine(engine).saved.values()) == names


@pytest.mark.parametrize(
    ("engine", "held", "refused"),
    [
        pytest.param("ort", "optimized.onnx", True, id="a result"),
        pytest.param("ort", "reduced.onnx", True, id="the smallest part that fails"),
        pytest.param("ort", "model.engine", False, id="a result of another engine"),
        pytest.param(None, "model.engine", True, id="a result of an engine that the model may choose"),
        pytest.param("tensorrt", "notes.txt", False, id="another file"),
        pytest.param("tensorrt", "timing.cache", False, id="the timing cache, which grows"),
    ],
)
def test_earlier_results_are_overwritten_by_force_only(tmp_path: Path, engine, held, refused):
    (tmp_path / held).write_text("earlier", encoding="utf-8")
    if refused:
        with pytest.raises(OutputError, match=held) as caught, open_output_folder(tmp_path, engine, force=False):
            pytest.fail("opened")
        assert caught.value.code == "Q601"
    with open_output_folder(tmp_path, engine, force=refused):
        # Nothing is lost before there is something new.
        assert (tmp_path / held).read_text(encoding="utf-8") == "earlier"


def test_a_folder_is_made_where_there_is_none(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    with open_output_folder(folder, "ort", force=False):
        assert folder.is_dir()
    with open_output_folder(None, "ort", force=False):
        pass


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


LENGTH = 12
STEPS = [f"t{k} = Relu({'x' if k == 0 else f't{k - 1}'})" for k in range(LENGTH)]

CHAIN = GraphIndex(infer_shapes(kit.graph(f"(float[2,4] x) => (float[2,4] t{LENGTH - 1}) {{ {' '.join(STEPS)} }}")))


@given(st.sets(st.integers(0, LENGTH - 1), min_size=1, max_size=3), st.booleans())
def test_exactly_the_nodes_that_fail_together_are_left(culprits, hinted):
    names = {f"t{k}/Relu" for k in culprits}

    def fails(part: onnx.ModelProto) -> bool:
        onnx.checker.check_model(part)
        return names <= {node.name for node in part.graph.node}

    found = find_smallest_failure(CHAIN, fails, seconds=60, hint=f"t{max(culprits)}/Relu" if hinted else "")
    model, reduced = found
    assert set(reduced.nodes) == names
    assert {node.name for node in model.graph.node} == names
    assert reduced.ops == ("Relu",) * len(names)


def test_no_smaller_part_no_answer():
    everything = {node.name for node in CHAIN.nodes}
    found = find_smallest_failure(CHAIN, lambda part: {n.name for n in part.graph.node} == everything, seconds=60)
    assert found is None


def test_without_time_nothing_is_built():
    def fails(part: onnx.ModelProto) -> bool:
        raise AssertionError("built")

    assert find_smallest_failure(CHAIN, fails, seconds=-1) is None


def test_weights_go_with_their_reader_and_cuts_are_legal():
    parts = Parts(GraphIndex(infer_shapes(kit.residual())))
    assert "wd/DequantizeLinear" not in parts.names
    model = parts.cut_part(["d/Conv"])
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["rd"]
    assert [value.name for value in model.graph.output] == ["d"]
    assert {node.name for node in model.graph.node} == {"d/Conv", "wd/DequantizeLinear"}


def test_a_tensor_of_unknown_rank_is_not_cut():
    index = GraphIndex(kit.residual())  # no shapes inferred
    assert Parts(index).cut_part(["d/Conv"]) is None
