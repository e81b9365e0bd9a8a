"""ORT's messages, turned into ours: the node or input, the fault, the remedy."""

from __future__ import annotations

import re

from onnxq.errors import DataError, ModelError, OnnxqError

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : -?\d+ : [A-Z_]+ : ")
_SOURCE = re.compile(r"/\S+\.(?:cc|h|cpp)(?::\d+)? .*?\) ")
# The innermost node is named last: an If that failed quotes the node inside that did.
_RUNNING = re.compile(r"while running (\S+) node\. Name:'([^']*)' Status Message: ")
_LOADING = (
    re.compile(r"In Node, \(\"(?P<name>[^\"]*)\", (?P<op>[^,]+),"),
    re.compile(r"Node ?\((?P<name>[^)]*)\) Op \((?P<op>[^)]*)\)"),
    re.compile(r"(?:for the|for) (?:node )?(?P<op>\w+)\(\d+\) node with name '(?P<name>[^']*)'"),
    re.compile(r"operator \((?P<op>\w+)\) in node \((?P<name>[^)]*)\)"),
)
_UNKNOWN = re.compile(r"Fatal error: (?P<domain>\S+?):(?P<op>[^\s:]+)\(-?\d+\) is not a registered function/op")
# Of ONNX and of ONNX Runtime itself: an operator unknown there comes from no library.
_BUILT_IN = frozenset({"ai.onnx", "ai.onnx.ml", "com.microsoft"})
_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")

_ANY_LIBRARY = (
    "give the shared library that implements it (`ort_library`, or `libraries` in the section `runtime` of the "
    "configuration), or quantize weights only (ort-int8-weights), without samples: that needs no run"
)
# Libraries that packages bring along, by the domain of their operators.
_LIBRARIES = {
    "ai.onnx.contrib": f"pip install onnxruntime-extensions, whose get_library_path() is the library; {_ANY_LIBRARY}"
}

_DIMS = re.compile(r"Got invalid dimensions for input: (?P<name>.+?) for the following indices(?P<rest>.*)", re.DOTALL)
_INDEX = re.compile(r"index: (\d+) Got: (-?\d+) Expected: (-?\d+)")
_RANK = re.compile(r"Invalid rank for input: (?P<name>.+?) Got: (?P<got>\d+) Expected: (?P<want>\d+)")


class UnknownOperatorError(ModelError):
    """An operator of a domain that ONNX Runtime has no code for; a library may bring it."""

    default_code = "Q113"


class NodeError(ModelError):
    """A node that ONNX Runtime cannot load or run. node: its name."""

    node: str = ""


def _node_error(name: str, op: str, cause: str, fix: str = "", *, code: str) -> NodeError:
    error = NodeError(f"node {name!r} ({op})", cause, fix, code=code)
    error.node = name
    return error


def clean_message(error: BaseException) -> str:
    """The message without ORT's error code and the source file it came from."""
    text = _PREFIX.sub("", str(error)).strip()
    return _SOURCE.sub("", text, count=1).strip() or type(error).__name__


def explain_load_failure(error: Exception, model: str) -> OnnxqError:
    """Why ORT refused a model, naming the node where ORT does."""
    text = clean_message(error)
    if _is_out_of_memory(error, text):
        return ModelError(
            model, "ONNX Runtime ran out of memory loading it", "free memory or use a larger machine", code="Q112"
        )
    unknown = _UNKNOWN.search(text)
    if unknown and unknown["domain"] not in _BUILT_IN:
        return _explain_unknown_operator(unknown["domain"], unknown["op"])
    for pattern in _LOADING:
        found = pattern.search(text)
        if found and found["name"]:
            return _node_error(found["name"], found["op"], f"ONNX Runtime cannot load it: {text}", code="Q110")
    return ModelError(
        model, f"ONNX Runtime cannot load it: {text}", "does onnx.checker accept it? is its opset known?", code="Q110"
    )


def _explain_unknown_operator(domain: str, op: str) -> UnknownOperatorError:
    return UnknownOperatorError(
        f"operator {op!r} of domain {domain!r}",
        "ONNX Runtime does not have it: it is a custom operator, whose code is not in the model",
        _LIBRARIES.get(domain, _ANY_LIBRARY),
    )


def explain_run_failure(error: Exception, model: str) -> OnnxqError:
    """Why a run failed: an input that does not fit, or a node that could not compute."""
    text = clean_message(error)
    if _is_out_of_memory(error, text):
        return ModelError(
            model, "ONNX Runtime ran out of memory", "use a smaller `batch=…` or `memory_limit=…`", code="Q112"
        )
    return _explain_bad_input(text) or _explain_bad_node(text, model)


def _explain_bad_input(text: str) -> OnnxqError | None:
    dims = _DIMS.search(text)
    if dims:
        found = _INDEX.findall(dims["rest"])
        wrong = "; ".join(f"axis {axis} has {got}, the model wants {want}" for axis, got, want in found)
        return DataError(f"input {dims['name']!r}", wrong or text, "give it the shape the model declares", code="Q209")
    rank = _RANK.search(text)
    if rank:
        cause = f"has {rank['got']} dimensions, the model wants {rank['want']}"
        return DataError(f"input {rank['name']!r}", cause, "give it the shape the model declares", code="Q209")
    return None


def _explain_bad_node(text: str, model: str) -> OnnxqError:
    nodes = _RUNNING.findall(text)
    if not nodes:
        return ModelError(model, f"ONNX Runtime cannot run it: {text}", code="Q111")
    op, name = nodes[-1]
    cause = _SOURCE.sub("", _RUNNING.split(text)[-1].strip(), count=1).strip()
    cause = f"failed in ONNX Runtime: {cause}"
    fix = "do the samples fit the model: sizes, index ranges, lengths that belong together?"
    if not name:
        return ModelError(f"an unnamed {op} node", cause, fix, code="Q111")
    return _node_error(name, op, cause, fix, code="Q111")


def _is_out_of_memory(error: Exception, text: str) -> bool:
    return isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY)
