"""The preparation passes in their order."""

from __future__ import annotations

from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, ModelLike, fold_constants, infer_shapes, name_nodes
from onnxq.graph.scopes import walk
from onnxq.nearest import did_you_mean
from onnxq.passes.activations import activations
from onnxq.passes.affine import batchnorm, scalars
from onnxq.passes.base import Context, PassEntry, PassReport, Prepared
from onnxq.passes.dead import dead
from onnxq.passes.layernorm import layernorm
from onnxq.passes.pad import pad
from onnxq.passes.pool import pool
from onnxq.passes.prelu import prelu
from onnxq.passes.residual import residual


def constants(proto: ModelLike, _context: Context) -> tuple[ModelLike, PassReport]:
    """What can be computed now becomes initializers: weights behind Cast or Transpose, shape chains, Pad amounts."""
    folded = infer_shapes(fold_constants(proto))
    left = {node.name for node in GraphIndex(folded).nodes}
    gone = [node for node in GraphIndex(proto).nodes if node.name not in left]
    return folded, PassReport("constants", tuple(f"{node.name}: {node.op_type} computed" for node in gone))


# Where a target is named the pass serves its fusions alone; TensorRT makes the same kernels of the chains and of the
# single nodes (counted on six networks), and older releases lack the parsers for the latter.
# Activations before scalars: x + 3 of a hard-sigmoid would otherwise end in the bias and hide the pattern.
PASSES: tuple[PassEntry, ...] = (
    PassEntry("constants", constants),
    PassEntry("dead", dead),
    PassEntry("activations", activations, target="ort"),
    PassEntry("layernorm", layernorm, target="ort"),
    PassEntry("residual", residual, target="ort"),
    PassEntry("prelu", prelu, target="ort"),
    PassEntry("pool", pool, target="ort"),
    PassEntry("pad", pad),
    PassEntry("batchnorm", batchnorm),
    PassEntry("scalars", scalars),
)


def prepare(proto: ModelLike, *, skip: frozenset[str] = frozenset(), target: str = "ort") -> Prepared:
    """A float-equivalent model ready for calibration for `target`; `proto` is not changed.

    skip: names of passes to leave out. target: "ort" turns chains into the single nodes ORT is
    fast with; any other leaves those passes out. The opset rises only where a
    pass needs it (HardSwish 14, LayerNormalization 17, Gelu 20), never above 20; where it cannot, that pass leaves the
    nodes and says so in its report.

    Raises ConfigError for a pass that does not exist.
    """
    names = [entry.name for entry in PASSES]
    for name in sorted(skip.difference(names)):
        raise ConfigError(f"prepare.skip: {name}", "there is no such pass", did_you_mean(name, names), code="Q320")
    context = Context(target, skip)
    named = name_nodes(proto)
    current = infer_shapes(named)
    reports = []
    for entry in PASSES:
        if entry.name not in skip and entry.target in ("", target):
            current, report = entry.run(current, context)
            reports.append(report)
    return Prepared(_declared(current, named), tuple(reports))


def _declared(proto: ModelLike, source: ModelLike) -> ModelLike:
    """Without the types that were inferred on the way, save those of operators onnx cannot infer.

    Engines fuse by what they know: types that the file did not tell them must not change what they make of it.
    """
    told = {(scope, value.name) for scope, graph in walk(source.graph) for value in graph.value_info}
    for scope, graph in walk(proto.graph):
        beyond = {name for node in graph.node if node.domain for name in node.output}
        kept = [value for value in graph.value_info if (scope, value.name) in told or value.name in beyond]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    return proto
