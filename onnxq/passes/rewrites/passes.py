"""The rewrites in their order."""

from __future__ import annotations

from onnxq.graph import GraphIndex, ModelLike, fold_constants, infer_shapes
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
