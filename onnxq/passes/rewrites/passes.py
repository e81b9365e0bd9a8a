"""The rewrites in their order."""

from __future__ import annotations

from dataclasses import replace

from onnxq.graph import GraphIndex, fold_constants, infer_shapes
from onnxq.passes.base import Pass, RunContext, Stage
from onnxq.passes.journal import PassReport
from onnxq.passes.rewrites.activations import fuse_activations
from onnxq.passes.rewrites.affine import fold_batchnorm, fold_scalars
from onnxq.passes.rewrites.layernorm import fuse_layernorm
from onnxq.passes.rewrites.single_nodes import (
    fold_pad,
    remove_dead,
    reorder_residual,
    replace_prelu,
    replace_reduce_mean,
    write_axes,
)
from onnxq.passes.state import FloatState, FloatStep


def compute_constants(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Compute constant subgraphs: weights behind Cast or Transpose, shape chains, Pad amounts."""
    folded = infer_shapes(fold_constants(state.model))
    left = {node.name for node in GraphIndex(folded).nodes}
    gone = [node for node in GraphIndex(state.model).nodes if node.name not in left]
    changed = tuple(f"{node.name}: {node.op_type} computed" for node in gone)
    return replace(state, model=folded), PassReport("constants", changed)


# `Target.skips` names the fusions, which are for ONNX Runtime alone: TensorRT makes the same kernels of the chains and
# of the single nodes (counted on six networks), and older releases lack the parsers for the latter.
# Activations before scalars: x + 3 of a hard-sigmoid would otherwise end in the bias and hide the pattern.
REWRITES: tuple[Pass[RunContext, FloatState], ...] = tuple(
    Pass(name, Stage.REWRITE, function, fast=True)
    for name, function in (
        ("constants", compute_constants),
        ("dead", remove_dead),
        ("activations", fuse_activations),
        ("layernorm", fuse_layernorm),
        ("residual", reorder_residual),
        ("prelu", replace_prelu),
        ("pool", replace_reduce_mean),
        ("pad", fold_pad),
        ("axes", write_axes),
        ("batchnorm", fold_batchnorm),
        ("scalars", fold_scalars),
    )
)
