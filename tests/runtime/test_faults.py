"""ONNX Runtime's messages in words for people: the node or input, the fault, the remedy."""

import pytest

from onnxq.errors import DataError, ModelError, OnnxqError
from onnxq.runtime import NodeError, UnknownOperatorError
from onnxq.runtime.faults import clean_message, explain_load_failure, explain_run_failure

SOURCE = "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::Arena(size_t, bool) "


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : Load model failed", "Load model failed"),
        ("[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model.", "This is an invalid model."),
        ("[ONNXRuntimeError] : -1 : NOT_SET : odd", "odd"),
        (f"[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : {SOURCE}Bad split", "Bad split"),
        ("plain words", "plain words"),
        (
            "FAIL : not at the start [ONNXRuntimeError] : 1 : FAIL : x",
            "FAIL : not at the start [ONNXRuntimeError] : 1 : FAIL : x",
        ),
        ("  ", "ValueError"),
    ],
)
def test_codes_and_source_files_go(text: str, clean: str) -> None:
    assert clean_message(ValueError(text)) == clean


# What ONNX Runtime says of a model that it refuses, with the node and its operator.
REFUSED = {
    "unknown": ('In Node, ("g", Gelu, "", -1) : ("x": tensor(float),) -> ("y",) , Error No Op registered', "g", "Gelu"),
    "a type": ("Type 'tensor(bool)' of input parameter (x) of operator (Relu) in node (r) is invalid.", "r", "Relu"),
    "types that differ": (
        "Type parameter (T) of Optype (Add) bound to different types (tensor(float) and tensor(int64) in node (sum).",
        "sum", "Add",
    ),
    "no kernel": ("Could not find an implementation for Conv(22) node with name 'c0'", "c0", "Conv"),
    "no kernel, older": ("Could not find an implementation for the node Conv(11) node with name 'c'", "c", "Conv"),
    "shapes": ("Node (mm) Op (MatMul) [ShapeInferenceError] Incompatible dimensions", "mm", "MatMul"),
    "no name": ("Node () Op (MatMul) [ShapeInferenceError] Incompatible dimensions", "", ""),
    "no node": ("Protobuf parsing failed.", "", ""),
    "its own operator": ("Fatal error: com.microsoft:Gelux(-1) is not a registered function/op", "", ""),
}  # fmt: skip


@pytest.mark.parametrize(("text", "name", "op"), REFUSED.values(), ids=REFUSED)
def test_a_refused_model_names_the_node_where_the_message_does(text: str, name: str, op: str) -> None:
    found = explain_load_failure(RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {text}"), "m.onnx")
    assert found.code == "Q110"
    assert found.cause == f"ONNX Runtime cannot load it: {text}"
    if name:
        assert (found.node, found.subject) == (name, f"node {name!r} ({op})")
    else:
        assert (type(found), found.subject) == (ModelError, "m.onnx")
    assert found.fix
    assert "samples" not in found.fix


def refused(text: str, *nodes: str) -> OnnxqError:
    return explain_load_failure(RuntimeError(f"[ONNXRuntimeError] : 9 : {text}"), "m.onnx", nodes=frozenset(nodes))


def test_the_remedy_is_of_the_fault() -> None:
    kernel = "NOT_IMPLEMENTED : Could not find an implementation for Conv(22) node with name 'c0'"
    assert "no kernel" in refused(kernel, "c0").fix
    assert "another opset" in refused('FAIL : In Node, ("g", Gelu, "", -1) : No Op registered for Gelu', "g").fix
    assert "onnx.checker" in refused("FAIL : Node (mm) Op (MatMul) [ShapeInferenceError] Incompatible", "mm").fix


def test_a_node_that_the_model_does_not_have_is_the_optimizers() -> None:
    text = "FAIL : Node (mm_token_7) Op (MatMul) [ShapeInferenceError] Incompatible dimensions"
    loading = refused(text, "mm")
    running = explain_run_failure(
        RuntimeError("Non-zero status code returned while running Gather node. Name:'mm_token_7' Status Message: bad"),
        "m.onnx", nodes=frozenset({"mm"}),
    )  # fmt: skip
    for found in (loading, running):
        assert isinstance(found, NodeError)
        assert "which the model does not have" in found.cause
        assert "with optimizations off, no sample is at fault" in found.fix
    # A session that was given a file knows no names.
    running = "Non-zero status code returned while running Gather node. Name:'pick' Status Message: bad"
    assert "samples" in explain_run_failure(RuntimeError(running), "m.onnx").fix


@pytest.mark.parametrize(
    ("domain", "custom"),
    [("my.ops", True), ("ai.onnx.contrib", True), ("com.microsoft", False), ("ai.onnx", False), ("ai.onnx.ml", False)],
)
def test_operators_of_foreign_domains_need_a_library(domain: str, custom: bool) -> None:
    text = f"Fatal error: {domain}:Swell(-1) is not a registered function/op"
    found = explain_load_failure(RuntimeError(text), "m.onnx")
    assert isinstance(found, UnknownOperatorError) is custom
    assert found.code == ("Q113" if custom else "Q110")
    if custom:
        assert found.subject == f"operator 'Swell' of domain {domain!r}"
        assert ("onnxruntime-extensions" in found.fix) is (domain == "ai.onnx.contrib")


MEMORY = [
    RuntimeError("std::bad_alloc"),
    RuntimeError(f"{SOURCE}Failed to allocate memory for requested buffer of size 99"),
    RuntimeError("CUDA error: out of memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", MEMORY)
def test_memory_that_runs_out_is_told_as_such(error: Exception) -> None:
    loading, running = explain_load_failure(error, "m.onnx"), explain_run_failure(error, "m.onnx")
    for found in (loading, running):
        assert (type(found), found.subject, found.code) == (ModelError, "m.onnx", "Q112")
        assert "ran out of memory" in found.cause
    assert "`memory_limit=…`" in running.fix
    assert "larger machine" in loading.fix


DIMS = (
    "Got invalid dimensions for input: images for the following indices\n index: 1 Got: 5 Expected: 4\n"
    " index: 3 Got: 9 Expected: 8\n Please fix either the inputs/outputs or the model."
)
RUN = "Non-zero status code returned while running {} node. Name:'{}' Status Message: {}"
NOT_NUMPY = "No corresponding Numpy type for Tensor Type. Int4x2"
FAILURES: dict[str, tuple[str, type[OnnxqError], str, str, str]] = {
    "sizes": (
        DIMS, DataError, "input 'images'", "axis 1 has 5, the model wants 4; axis 3 has 9, the model wants 8", "Q209",
    ),
    "rank": (
        "Invalid rank for input: x Got: 1 Expected: 2 Please fix either the inputs/outputs or the model.",
        DataError, "input 'x'", "has 1 dimensions, the model wants 2", "Q209",
    ),
    "a node": (
        RUN.format("Gather", "pick", "indices element out of data bounds"),
        NodeError, "node 'pick' (Gather)", "failed in ONNX Runtime: indices element out of data bounds", "Q111",
    ),
    "a node inside another": (
        RUN.format("If", "outer", RUN.format("Gather", "inner", f"{SOURCE}no such index")),
        NodeError, "node 'inner' (Gather)", "failed in ONNX Runtime: no such index", "Q111",
    ),
    "a node without a name": (
        RUN.format("Reshape", "", "cannot be reshaped"),
        NodeError, "an unnamed Reshape node", "failed in ONNX Runtime: cannot be reshaped", "Q111",
    ),
    "a type that is not numpy's": (
        NOT_NUMPY, ModelError, "m.onnx",
        f"has a value of a type that ONNX Runtime does not hand to Python: {NOT_NUMPY}", "Q111",
    ),
    "anything else": ("it broke", ModelError, "m.onnx", "ONNX Runtime cannot run it: it broke", "Q111"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "subject", "cause", "code"), FAILURES.values(), ids=FAILURES)
def test_a_failed_run(text: str, kind: type[OnnxqError], subject: str, cause: str, code: str) -> None:
    found = explain_run_failure(RuntimeError(f"[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : {text}"), "m.onnx")
    assert (type(found), found.subject, found.cause, found.code) == (kind, subject, cause, code)
    if isinstance(found, NodeError) and found.node:
        assert found.subject.startswith(f"node {found.node!r} ")
