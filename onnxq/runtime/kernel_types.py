"""Types of the tensors that ONNX Runtime's optimizer makes, which it does not write into the graph."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx

from onnxq.graph.scopes import iterate_subgraphs, list_declared
from onnxq.runtime.session import import_onnxruntime, read_element_type


def declare_types(optimized: onnx.ModelProto) -> None:
    """Declare in place the types of tensors that ONNX Runtime's own operators make, as its schemas tell them.

    onnx's inference knows none of these operators and stops at the first.
    """
    _declare_graph(optimized.graph, {})


def _declare_graph(graph: onnx.GraphProto, outer: Mapping[str, int]) -> None:
    own = {
        value.name: value.type.tensor_type.elem_type
        for value in list_declared(graph)
        if value.type.HasField("tensor_type")
    }
    known = {**outer, **own, **{one.name: one.data_type for one in graph.initializer}}
    before = set(known)
    for node in graph.node:
        for _, body in iterate_subgraphs(node):
            # A body sees what was made before its node.
            _declare_graph(body, known)
        _bind_types(node, known)
    found = (name for name in known if name not in before)
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, known[name], None) for name in found
    )


def _bind_types(node: onnx.NodeProto, known: dict[str, int]) -> None:
    """Tensors of a node that share a type with one that is known, and those that have no choice."""
    # Both names mean ONNX's own operators.
    schema = _list_schemas().get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    if schema is None:
        return
    pairs = [*_pair_tensors(node.input, schema.inputs), *_pair_tensors(node.output, schema.outputs)]
    bound = {each.typeStr: known[name] for name, each in pairs if known.get(name)}
    for name, each in pairs:
        kind = bound.get(each.typeStr) or (
            read_element_type(next(iter(each.types))) if len(each.types) == 1 else 0
        )
        if kind and not known.get(name):
            known[name] = kind


def _pair_tensors(names: Sequence[str], formal: Sequence[Any]) -> list[tuple[str, Any]]:
    """Names with their formal parameters, of which the last may stand for many; without those of mixed types."""
    last = len(formal) - 1
    pairs = [(name, formal[min(k, last)]) for k, name in enumerate(names) if name and formal]
    return [(name, each) for name, each in pairs if each.isHomogeneous]


@lru_cache(maxsize=1)
def _list_schemas() -> dict[tuple[str, str], Any]:
    """The newest schema of every operator by domain and name; {} in a build that keeps them to itself."""
    import_onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    every = state.get_all_operator_schema() if hasattr(state, "get_all_operator_schema") else ()
    # The newest comes last.
    return {(one.domain, one.name): one for one in sorted(every, key=lambda one: one.since_version)}
