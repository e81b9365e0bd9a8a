"""ORT's messages, turned into ours: the node or input, the fault, the remedy."""

from __future__ import annotations

import re
from collections.abc import Collection

import onnx

from onnxq.errors import DataError, ModelError, OnnxqError
from onnxq.graph.base import MICROSOFT
from onnxq.graph.shapes import is_custom

# ORT begins with "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : ", and goes on with the
# place in its source.
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : -?\d+ : [A-Z_]+ : ")
_SOURCE = re.compile(r"/\S+\.(?:cc|h|cpp)(?::\d+)? .*?\) ")
# The innermost node is named last: an If that failed quotes the node inside that did.
_RUNNING = re.compile(r"while running (\S+) node\. Name:'([^']*)' Status Message: ")
_LOADING = (
    re.compile(r"In Node, \(\"(?P<name>[^\"]*)\", (?P<op>[^,]+), \"(?P<domain>[^\"]*)\""),
    re.compile(r"Node ?\((?P<name>[^)]*)\) Op \((?P<op>[^)]*)\)"),
    re.compile(r"(?:for the|for) (?:node )?(?P<op>\w+)\(\d+\) node with name '(?P<name>[^']*)'"),
    re.compile(r"operator \((?P<op>\w+)\) in node \((?P<name>[^)]*)\)"),
    re.compile(r"Optype \((?P<op>\w+)\) bound to .* in node \((?P<name>[^)]*)\)"),
)
_NO_KERNEL = " : NOT_IMPLEMENTED : "
_UNKNOWN = re.compile(
    r"Fatal error: (?P<domain>\S+?):(?P<op>[^\s:]+)\(-?\d+\) is not a registered function/op"
)
# Of ONNX and of ONNX Runtime itself: an operator unknown there comes from no library.
_BUILT_IN = ("ai.onnx", "ai.onnx.ml", "com.microsoft")
_CUSTOM = "ONNX Runtime does not have it: it is a custom operator, whose code is not in the model"
_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")

_NOT_NUMPY = "No corresponding Numpy type"
_SAMPLES = "do the samples fit the model: sizes, index ranges, lengths that belong together?"
_CHECK = (
    "does onnx.checker accept it? is its opset known? Export it again, or take a newer onnxruntime"
)
_BRANCH = "Graph attribute inferencing failed"
_BRANCH_FIX = (
    "a branch in it does not take the sizes of the inputs. Where these were fixed (by `fix=…`, or from samples for a "
    "target that compiles for fixed sizes), export the model with the branch alone that they are for"
)
_UNREGISTERED = "No Op registered"
_UNREGISTERED_FIX = (
    "export the model with another opset, which has the operator, or take a newer onnxruntime"
)
_NO_KERNEL_FIX = (
    "it has no kernel for these types or this version: export the model in float32, or with another opset, or take a "
    "newer onnxruntime"
)
# Fused nodes are new ones too, and compute what samples make fail.
_OPTIMIZER = (
    "ONNX Runtime's optimizer made this node: where the model runs with optimizations off, no sample is at fault. Then "
    "another version of onnxruntime may not make it; else export the model with fixed sizes, or keep the nodes around "
    "it float with a rule"
)
_ANY_LIBRARY = (
    "give the shared library that implements it (`ort_library`, or `libraries` in the section `runtime` of the "
    "configuration), or quantize weights only (ort-int8-weights), without samples: that needs no run"
)
# Libraries that packages bring along, by the domain of their operators.
_LIBRARIES = {
    "ai.onnx.contrib": f"pip install onnxruntime-extensions, whose get_library_path() is the library; {_ANY_LIBRARY}"
}

_DIMS = re.compile(
    r"Got invalid dimensions for input: (?P<name>.+?) for the following indices(?P<rest>.*)",
    re.DOTALL,
)
_INDEX = re.compile(r"index: (\d+) Got: (-?\d+) Expected: (-?\d+)")
_RANK = re.compile(
    r"Invalid rank for input: (?P<name>.+?) Got: (?P<got>\d+) Expected: (?P<want>\d+)"
)


# Names of the model's own nodes; None: not known.
OwnNodes = Collection[str] | None


class NodeError(ModelError):
    """A node that an engine cannot load or run."""

    def name_node(self, node: str) -> NodeError:
        """The error itself, which then names a node."""
        self.node = node
        return self


class UnknownOperatorError(NodeError):
    """An operator that ONNX Runtime has no code for; a library may bring it.

    operator: its domain and type, where ONNX Runtime names no node.
    """

    default_code = "Q113"
    operator: tuple[str, str] | None = None


class KernelError(NodeError):
    """A node of a legal model that ONNX Runtime has no kernel for, in its types or its version."""


def clean_message(error: BaseException) -> str:
    """The message without ORT's error code and the source file it came from."""
    text = _PREFIX.sub("", str(error)).strip()
    return _SOURCE.sub("", text, count=1).strip() or type(error).__name__


def explain_load_failure(error: Exception, model: str, *, nodes: OwnNodes = None) -> OnnxqError:
    """Why ORT refused a model, naming the node where ORT does."""
    text = clean_message(error)
    if _is_out_of_memory(error, text):
        cause = "ONNX Runtime ran out of memory loading it"
        return ModelError(model, cause, "free memory or use a larger machine", code="Q112")
    unknown = _UNKNOWN.search(text)
    if unknown and unknown["domain"] not in _BUILT_IN:
        domain = unknown["domain"]
        op = unknown["op"]
        fix = _LIBRARIES.get(domain, _ANY_LIBRARY)
        custom = UnknownOperatorError(f"operator {op!r} of domain {domain!r}", _CUSTOM, fix)
        custom.operator = domain, op
        return custom
    cause = f"ONNX Runtime cannot load it: {text}"
    kind = KernelError if _NO_KERNEL in str(error) else NodeError
    for pattern in _LOADING:
        match = pattern.search(text)
        # Of a node whose function ORT runs, a part that has no kernel comes without a name.
        if match and (match["name"] or kind is KernelError):
            subject = _name_node(match["op"], match["name"])
            # ONNX Runtime has schemas of some of TensorRT's plugins, in ONNX's domain, and demands what they say.
            domain = match.groupdict().get("domain", "" if kind is KernelError else MICROSOFT)
            if is_custom(onnx.NodeProto(op_type=match["op"], domain=domain)):
                return UnknownOperatorError(subject, _CUSTOM, _ANY_LIBRARY).name_node(match["name"])
            fix = (
                _NO_KERNEL_FIX
                if kind is KernelError
                else _UNREGISTERED_FIX
                if _UNREGISTERED in text
                else _BRANCH_FIX
                if _BRANCH in text
                else _CHECK
            )
            return _blame_node(kind, subject, match["name"], cause, fix, "Q110", nodes)
    return ModelError(model, cause, _CHECK, code="Q110")


def explain_run_failure(error: Exception, model: str, *, nodes: OwnNodes = None) -> OnnxqError:
    """Why a run failed: an input that does not fit, or a node that could not compute. nodes: as for loading."""
    text = clean_message(error)
    if _is_out_of_memory(error, text):
        fix = "use a smaller `batch=…` or `memory_limit=…`"
        return ModelError(model, "ONNX Runtime ran out of memory", fix, code="Q112")
    if _NOT_NUMPY in text:
        cause = f"has a value of a type that ONNX Runtime does not hand to Python: {text}"
        return ModelError(
            model, cause, "cast that output to float32 or int8 inside the model", code="Q111"
        )
    return _explain_bad_input(text) or _explain_bad_node(text, model, nodes)


def _explain_bad_input(text: str) -> OnnxqError | None:
    fault = _DIMS.search(text) or _RANK.search(text)
    if fault is None:
        return None
    if fault.re is _RANK:
        cause = f"has {fault['got']} dimensions, the model wants {fault['want']}"
    else:
        dims = _INDEX.findall(fault["rest"])
        cause = (
            "; ".join(f"axis {axis} has {got}, the model wants {want}" for axis, got, want in dims)
            or text
        )
    return DataError(
        f"input {fault['name']!r}", cause, "give it the shape the model declares", code="Q209"
    )


def _explain_bad_node(text: str, model: str, nodes: OwnNodes) -> OnnxqError:
    running = _RUNNING.findall(text)
    if not running:
        return ModelError(model, f"ONNX Runtime cannot run it: {text}", _SAMPLES, code="Q111")
    op, name = running[-1]
    cause = _SOURCE.sub("", _RUNNING.split(text)[-1].strip(), count=1).strip()
    subject = _name_node(op, name)
    return _blame_node(
        NodeError, subject, name, f"failed in ONNX Runtime: {cause}", _SAMPLES, "Q111", nodes
    )


def _blame_node(
    kind: type[NodeError],
    subject: str,
    name: str,
    cause: str,
    fix: str,
    code: str,
    nodes: OwnNodes,
) -> OnnxqError:
    """The error of a node, which ORT's optimizer may have made."""
    if nodes is not None and name not in nodes:
        cause = f"{cause}; it is a node which the model does not have"
        fix = _OPTIMIZER
    return kind(subject, cause, fix, code=code).name_node(name)


def _name_node(op: str, name: str) -> str:
    return f"node {name!r} ({op})" if name else f"an unnamed {op} node"


def _is_out_of_memory(error: Exception, text: str) -> bool:
    return isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY)
