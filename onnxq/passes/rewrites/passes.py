"""The rewrites in their order."""

from __future__ import annotations

from typing import NamedTuple

from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, ModelLike, fold_constants, infer_shapes, name_nodes
from onnxq.graph.scopes import walk_graphs
from onnxq.nearest import suggest_names
from onnxq.passes.base import Pass, RunContext, Stage, rewriting
from onnxq.passes.journal import PassReport
from onnxq.passes.rewrites.activations import fuse_activations
from onnxq.passes.rewrites.affine import fold_batchnorm, fold_scalars
from onnxq.passes.rewrites.axes import write_axes
from onnxq.passes.rewrites.dead import remove_dead
from onnxq.passes.rewrites.layernorm import fuse_layernorm
from onnxq.passes.rewrites.pad import fold_pad
from onnxq.passes.rewrites.pool import replace_reduce_mean
from onnxq.passes.rewrites.prelu import replace_prelu
from onnxq.passes.rewrites.residual import reorder_residual
from onnxq.passes.runner import run_stage
from onnxq.passes.state import State


def compute_constants(proto: ModelLike, _ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Compute constant subgraphs: weights behind Cast or Transpose, shape chains, Pad amounts."""
    folded = infer_shapes(fold_constants(proto))
    left = {node.name for node in GraphIndex(folded).nodes}
    gone = [node for node in GraphIndex(proto).nodes if node.name not in left]
    return folded, PassReport("constants", tuple(f"{node.name}: {node.op_type} computed" for node in gone))


# Where a target is named the pass serves its fusions alone; TensorRT makes the same kernels of the chains and of the
# single nodes (counted on six networks), and older releases lack the parsers for the latter.
# Activations before scalars: x + 3 of a hard-sigmoid would otherwise end in the bias and hide the pattern.
REWRITES: tuple[Pass, ...] = tuple(
    Pass(name, Stage.REWRITE, rewriting(function), target=target, fast=True)
    for name, function, target in (
        ("constants", compute_constants, ""),
        ("dead", remove_dead, ""),
        ("activations", fuse_activations, "ort"),
        ("layernorm", fuse_layernorm, "ort"),
        ("residual", reorder_residual, "ort"),
        ("prelu", replace_prelu, "ort"),
        ("pool", replace_reduce_mean, "ort"),
        ("pad", fold_pad, ""),
        ("axes", write_axes, ""),
        ("batchnorm", fold_batchnorm, ""),
        ("scalars", fold_scalars, ""),
    )
)


class Rewritten(NamedTuple):
    """A float-equivalent model, and the report of each pass that ran, in order."""

    proto: ModelLike
    reports: tuple[PassReport, ...]


def rewrite_model(
    proto: ModelLike, *, skip: frozenset[str] = frozenset(), target: str = "ort", computes: int = 0
) -> Rewritten:
    """A float-equivalent model ready for calibration for `target`, and the reports; `proto` is not changed.

    skip: names of rewrites to leave out. target: "ort" turns chains into the single nodes ORT is fast with; any other
    leaves those passes out. The opset rises only where a pass needs it (HardSwish 14, LayerNormalization 17, Gelu 20),
    never above 20; where it cannot, that pass leaves the nodes and says so in its report. computes: the narrow ONNX
    type that the model came in, to which its constants are rounded.

    Raises ConfigError for a pass that does not exist.
    """
    names = [entry.name for entry in REWRITES]
    # Sorted, since sets have no order and the error is of the first.
    for name in sorted(skip.difference(names)):
        raise ConfigError(f"prepare.skip: {name}", "there is no such pass", suggest_names(name, names), code="Q320")
    named = name_nodes(proto)
    ctx = RunContext(config=Config.model_validate({"target": target}), skip=skip, computes=computes)
    state = run_stage(REWRITES, Stage.REWRITE, ctx, State(named, infer_shapes(named)))
    return Rewritten(_drop_inferred_types(state.model, named), tuple(ctx.journal))


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
