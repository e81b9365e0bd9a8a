"""Constants that a Loop or Scan hands from step to step: read from outside, they are weights like all others."""

from __future__ import annotations

from dataclasses import replace

from onnx import GraphProto

from onnxq.graph import GraphIndex, NodeRef, copy_proto, get_index, iterate_subgraphs, rebuild
from onnxq.graph.scopes import list_defined, rename_reads, walk_graphs
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import TensorId

# Inputs of a Loop in front of its state, a count and a condition, and results of its body in front of it, a condition.
_LEADING = {"Loop": (2, 1), "Scan": (0, 0)}


def read_invariants(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Let the bodies of loops read constants from outside that every step hands to the next as they are.

    tf2onnx makes a loop of a Keras LSTM and state of its weights, so that no operator in it seems to have any.
    """
    index = get_index(state.model)
    proto = copy_proto(state.model)
    changed = list[str]()
    for _, graph in walk_graphs(proto.graph):
        for node in graph.node:
            if node.op_type not in _LEADING or node.domain:
                continue
            ((_, body),) = iterate_subgraphs(node)
            inputs, conditions = _LEADING[node.op_type]
            # From the last on, so that places in front stay.
            for k in reversed(_find_invariants(index, index.find_node(node.name), body)):
                source = node.input[k]
                rename_reads(body, {body.input[k].name: source})
                # Results at the end that nobody reads may be left out.
                for result in node.output[k - inputs : k - inputs + 1]:
                    rename_reads(graph, {result: source})
                    del node.output[k - inputs]
                del node.input[k], body.input[k], body.output[k - inputs + conditions]
                changed.append(f"{node.name}: reads {source} from outside")
    return (
        replace(state, model=rebuild(state.model, proto)) if changed else state,
        PassReport("invariants", tuple(changed)),
    )


def _find_invariants(index: GraphIndex, loop: NodeRef, body: GraphProto) -> list[int]:
    """The inputs of a loop with constants that its body gives out as it reads them, in ascending order."""
    inputs, conditions = _LEADING[loop.op_type]
    end = len(loop.inputs) - loop.attrs.get("num_scan_inputs", 0)
    repeats = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
    results = [repeats.get(value.name, value.name) for value in body.output]
    hidden = {name for _, inner in walk_graphs(body) for name in list_defined(inner)}
    return [
        k
        for k in range(inputs, end)
        if (tensor := index.find_input(loop, k)) is not None
        and index.is_constant(tensor)
        and tensor.name not in hidden
        and results[k - inputs + conditions] == body.input[k].name
        and results.count(body.input[k].name) == 1
        and not any(
            index.is_kept(TensorId(result, loop.scope))
            for result in loop.outputs[k - inputs : k - inputs + 1]
        )
    ]
