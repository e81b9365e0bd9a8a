"""What the QNN provider says of its graphs, as kernels and as nodes left to the CPU."""

import re

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.backends.qnn.kernels import NodeNames, find_fix
from onnxq.commands.prove import find_unmet_requirement
from onnxq.engines.prove.proof import SiteState
from tests.backends.qnn.graphs import make_graph, needs_qnn, prove
from tests.engines.kit import graph


@needs_qnn
@pytest.mark.parametrize(("data", "dtype"), [(np.uint8, "int8"), (np.uint16, "int16")])
def test_a_product_with_pairs_on_all_sides_computes_in_integers(data: type, dtype: str) -> None:
    proof = prove("conv", data)
    assert (proof.placement.partitions, proof.placement.left) == (1, ())
    node = proof.node("c/Conv")
    assert (node.type, node.kind, node.types) == (dtype, "Conv2d", f"{np.dtype(data)} x int8 -> {np.dtype(data)}")
    assert {site.site: site.state for site in proof.sites} == dict.fromkeys(("x", "w", "yd"), SiteState.FUSED)
    kernel = next(one for one in proof.kernels if one.kind == "Conv2d")
    assert "y/Relu" in kernel.nodes
    assert kernel.weights[0].layout == "several scales"
    assert re.fullmatch(r"scale [\d.e-]+, zero point 0", kernel.outputs[0].layout)


@needs_qnn
def test_weights_of_four_bits_are_told_from_those_of_eight() -> None:
    model = make_graph("conv", np.uint16)
    for name in ("w", "wz"):
        tensor = next(one for one in model.graph.initializer if one.name == name)
        values = numpy_helper.to_array(tensor) % 8
        tensor.CopyFrom(helper.make_tensor(name, TensorProto.INT4, values.shape, values.ravel().tolist()))
    node = onnxq.prove(model, overrides={"engine": "qnn"}).node("c/Conv")
    assert (node.type, node.types, node.reason) == ("int4 weights, int16", "uint16 x int4 -> uint16", "")


@needs_qnn
def test_an_operator_that_the_npu_lacks_cuts_the_network_in_two() -> None:
    proof = prove("cut")
    (left,) = proof.placement.left
    assert (proof.placement.partitions, left.subject, left.code) == (2, "e/Erf", "R116")
    assert "not supported" in left.reason
    assert "Gelu" in left.fix


@needs_qnn
def test_a_node_that_the_validator_refuses_is_named_with_a_fix() -> None:
    proof = prove("gemm")
    (left,) = proof.placement.left
    reason = "the validator of the HTP refuses it as FullyConnected (error 3110)"
    assert (left.subject, left.reason) == ("y/Gemm", reason)
    assert "on its output" in left.fix
    assert proof.node("y/Gemm").type == "CPU"
    assert left.reason in proof.node("y/Gemm").reason
    assert "left to the CPU" in proof.site("v").reason


@needs_qnn
@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("conv", {"require_int": True, "max_partitions": 1}, ""),
        ("cut", {"max_partitions": 1}, "2 partitions run on the device, and 1 nodes on the CPU"),
        ("gemm", {"require_int": True}, "not in integers"),
    ],
)
def test_demands_on_the_device_fail_the_command(name: str, overrides: dict[str, object], text: str) -> None:
    proof = prove(name, **overrides)
    error = find_unmet_requirement(proof)
    assert proof.holds == (error is None)
    assert text in str(error) if text else error is None


@needs_qnn
def test_a_build_that_the_validator_ends_blames_the_node() -> None:
    build = prove("conv", np.int16, np.uint8).build
    assert (str(build.state), build.node) == ("failed", "c/Conv")
    assert "refuses it as Conv2d" in build.reason
    assert "int8 for weights" in str(find_unmet_requirement(prove("conv", np.int16, np.uint8)))


@needs_qnn
def test_integers_are_demanded_of_other_engines_too() -> None:
    model = make_graph("conv")
    assert onnxq.prove(model, overrides={"engine": "ort", "require_int": True}).holds
    (requirement,) = onnxq.prove(make_graph("cut"), overrides={"engine": "ort", "require_int": True}).requirements
    assert "e/Erf" in requirement.unmet


def test_nodes_are_found_by_the_names_that_rewrites_give_them() -> None:
    model = graph("(float[4] x) => (float[4] y) { [a] h = Relu(x) [Transpose] y = Transpose(h) }")
    names = NodeNames(model)
    found = [names.find_node(name) for name in ("a", "a_token_7", "a/duplicated", "Transpose_token_7", "b_token_1")]
    assert found == ["a", "a", "a", "", ""]


def test_known_reasons_have_a_fix() -> None:
    assert "sizes" in find_fix("Cannot get shape")
    assert find_fix("no such reason") == ""
