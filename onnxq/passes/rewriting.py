"""Rewrites of the float model: the first stage of the passes, which needs no samples."""

from __future__ import annotations

from onnxq.graph import ModelLike, infer_shapes, name_nodes
from onnxq.graph.scopes import walk_graphs
from onnxq.passes import registry
from onnxq.passes.base import RunContext, Stage
from onnxq.passes.runner import run_stage
from onnxq.passes.state import State


def list_rewrites() -> frozenset[str]:
    """The names of all rewrites."""
    return frozenset(entry.name for entry in registry.PASSES if entry.stage is Stage.REWRITE)


def rewrite_model(proto: ModelLike, ctx: RunContext) -> ModelLike:
    """A float-equivalent model ready for calibration for the target of `ctx`, whose journal gets the reports.

    `proto` is not changed. The opset rises only where a pass needs it (HardSwish 14, LayerNormalization 17, Gelu 20),
    never above 20; where it cannot, that pass leaves the nodes and says so in its report.
    """
    named = name_nodes(proto)
    state = run_stage(registry.PASSES, Stage.REWRITE, ctx, State(named, infer_shapes(named)))
    return _drop_inferred_types(state.model, named)


def _drop_inferred_types(proto: ModelLike, source: ModelLike) -> ModelLike:
    """Without the types that were inferred on the way, save those of operators onnx cannot infer.

    Engines fuse by the types they know: types that the file did not tell them must not change their fusions.
    """
    declared = {(scope, value.name) for scope, graph in walk_graphs(source.graph) for value in graph.value_info}
    for scope, graph in walk_graphs(proto.graph):
        beyond = {name for node in graph.node if node.domain for name in node.output}
        kept = [value for value in graph.value_info if (scope, value.name) in declared or value.name in beyond]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    return proto
