"""All passes in the order in which they run, and the first stage of them, the rewrites, which need no samples."""

from dataclasses import replace
from typing import Any

from onnxq.config import Config
from onnxq.errors import ConfigError, suggest_names
from onnxq.graph import fold_constants, infer_shapes, name_nodes
from onnxq.graph.scopes import replace_items, walk_graphs, walk_nodes
from onnxq.passes.base import Pass, RunContext, Stage, always, is_for_whole_graphs, never, run_stage
from onnxq.passes.equalization.passes import EQUALIZATION
from onnxq.passes.journal import PassReport
from onnxq.passes.mixed_precision import float_parts
from onnxq.passes.mixed_precision.activation_bits import ACTIVATION_BITS, WIDE_ACTIVATIONS
from onnxq.passes.mixed_precision.noisy_pairs import DYNAMIC_SCALES, FLOAT_OPS, SENSITIVE_OPS
from onnxq.passes.mixed_precision.promotion import PROMOTION, ROUNDING_AGAIN
from onnxq.passes.mixed_precision.weight_bits import EMBEDDINGS, WEIGHT_BITS
from onnxq.passes.patterns import INVARIANTS
from onnxq.passes.ranges import RANGES
from onnxq.passes.rewrites import products, single_nodes, whole
from onnxq.passes.rewrites.activations import fuse_activations
from onnxq.passes.rewrites.fused import write_out_fused
from onnxq.passes.rewrites.normalizations import fold_batchnorm, fold_scalars, fuse_layernorm
from onnxq.passes.rewrites.ranks import lower_ranks
from onnxq.passes.rounding.layerwise import AUGMENTED
from onnxq.passes.rounding.passes import ROUNDING
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import NameSet


def compute_constants(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Compute constant subgraphs: weights behind Cast or Transpose, shape chains, Pad amounts."""
    folded = infer_shapes(fold_constants(state.model))
    left = {node.name for node in walk_nodes(folded.graph)}
    gone = [node for node in walk_nodes(state.model.graph) if node.name not in left]
    changed = tuple(f"{node.name}: {node.op_type} computed" for node in gone)
    return replace(state, model=folded), PassReport("constants", changed)


# What scores vanish beside, and limits them: only for a model that has rows in which everything is masked.
MASKED_ROWS = "masked_rows"
# `Target.skips` names the fusions, which are for ONNX Runtime alone: TensorRT makes the same kernels of the chains and
# of the single nodes (counted on six networks), and older releases lack the parsers for the latter.
# Activations before scalars: x + 3 of a hard-sigmoid would otherwise end in the bias and hide the pattern.
_WHOLE = (
    "attention_parts",
    MASKED_ROWS,
    "masks",
    "splits",
    "ranks",
    "reciprocals",
    "pool_pads",
    "swishes",
    "biases",
)
_CONDITIONS = {
    **dict.fromkeys(_WHOLE, is_for_whole_graphs),
    "gemms": lambda ctx, _: ctx.config.mode == "weight-only",
    "upsampling": lambda ctx, _: ctx.config.mode in ("static", "auto"),
    "fused": lambda _, state: any(node.domain for node in state.index.nodes),
}
# ONNX Runtime's LayerNormFusion takes in a Cast to float32 in front of a norm written out, and then refuses the node of
# two types that it made (opset 17 and later): beside other float types norms are single nodes for every target.
_REQUIRED = {
    "layernorm": lambda ctx, state: state.types.narrow or float_parts.chooses_types(ctx, state)
}
REWRITES = tuple(
    Pass(
        name,
        function,
        stage=Stage.REWRITE,
        fast=True,
        applies=_CONDITIONS.get(name, always),
        required=_REQUIRED.get(name, never),
    )
    for name, function in (
        # What ONNX Runtime's optimizer fused is looked at as the operators that it was.
        ("fused", write_out_fused),
        ("attention_parts", whole.write_out_attention),
        ("constants", compute_constants),
        (INVARIANTS, single_nodes.read_invariants),
        # Behind what tells the sizes of constants.
        ("einsums", products.write_out_einsums),
        ("stacks", products.part_stacks),
        ("addends", products.part_gemms),
        ("lookups", products.write_lookups),
        ("tables", products.flatten_tables),
        ("dead", single_nodes.remove_dead),
        ("activations", fuse_activations),
        ("layernorm", fuse_layernorm),
        ("residual", single_nodes.reorder_residual),
        ("prelu", single_nodes.replace_prelu),
        ("pool", single_nodes.replace_reduce_mean),
        ("pad", single_nodes.fold_pad),
        ("axes", single_nodes.write_axes),
        # By the values that masks have in the file.
        (MASKED_ROWS, whole.level_masked_rows),
        ("masks", whole.bound_masks),
        ("splits", whole.cut_splits),
        # Behind what makes Slices.
        ("ranks", lower_ranks),
        ("reciprocals", whole.replace_reciprocals),
        ("pool_pads", whole.pad_pools),
        ("swishes", whole.flatten_swishes),
        ("batchnorm", fold_batchnorm),
        ("scalars", fold_scalars),
        # Behind what gives operators their biases.
        ("biases", whole.fuse_biases),
        ("gemms", single_nodes.write_out_gemms),
        ("upsampling", products.write_out_upsampling),
    )
)


PASSES: tuple[Pass[Any, Any], ...] = (
    *REWRITES,
    *EQUALIZATION,
    # Before whatever judges plans by their outputs: those of wrong ranges say little.
    *RANGES,
    # Ranges are for the fewest bits; the rounding of weights is judged beside the most.
    WIDE_ACTIVATIONS,
    FLOAT_OPS,
    DYNAMIC_SCALES,
    SENSITIVE_OPS,
    # Widths and places of pairs before weights are rounded for them.
    WEIGHT_BITS,
    float_parts.ATTENTION,
    *ROUNDING,
    ACTIVATION_BITS,
    float_parts.ATTENTION_AGAIN,
    # Judged beside the errors that are left, and before a request for accuracy is met.
    EMBEDDINGS,
    # Last, as it pays in speed for what all others could not mend; weights are then rounded for what is left.
    PROMOTION,
    ROUNDING_AGAIN,
    float_parts.FLOAT_TYPES,
)
# All that `skip` may name: the passes, and a part of one.
SKIPPABLE = frozenset((AUGMENTED, *(entry.name for entry in PASSES)))


def check_skip(config: Config) -> None:
    """ConfigError, with file and line, for a name in `skip` that no pass has."""
    for k, name in enumerate(config.skip):
        if name not in SKIPPABLE:
            raise ConfigError(
                config.where(f"skip[{k}]"),
                f"no pass is called {name!r}",
                suggest_names(name, SKIPPABLE),
                code="Q320",
            )


def list_rewrites() -> NameSet:
    """The names of all rewrites."""
    return frozenset(entry.name for entry in PASSES if entry.stage is Stage.REWRITE)


def rewrite_model(ctx: RunContext, state: FloatState) -> FloatState:
    """The state with a float-equivalent model ready for calibration; the context's journal gets the reports.

    The opset rises only where a pass needs it (HardSwish 14, LayerNormalization 17, Gelu 20), never above 20; where it
    cannot, that pass leaves the nodes and says so in its report.
    """
    named = name_nodes(state.model)
    after = run_stage(PASSES, Stage.REWRITE, ctx, replace(state, model=infer_shapes(named)))
    # Without the types that were inferred on the way, save those of operators onnx cannot infer. Engines fuse by the
    # types they know: types that the file did not tell them must not change their fusions.
    declared = {
        (scope, value.name)
        for scope, graph in walk_graphs(named.graph)
        for value in graph.value_info
    }
    for scope, graph in walk_graphs(after.model.graph):
        beyond = {name for node in graph.node if node.domain for name in node.output}
        kept = [
            value
            for value in graph.value_info
            if (scope, value.name) in declared or value.name in beyond
        ]
        replace_items(graph.value_info, kept)
    return replace(state, model=after.model)
