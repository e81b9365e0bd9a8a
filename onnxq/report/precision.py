"""The float types of a plan in words: that of what is not quantized, and the nodes that stay in float32, and why."""

from __future__ import annotations

from collections.abc import Iterator

from onnxq.plan import KeepReason, KeptFloat32, PrecisionPlan
from onnxq.spec import FloatType

# Names of a reason without `verbose`.
_SHOWN = 3


def format_precision(types: PrecisionPlan, verbose: bool = False) -> Iterator[str]:
    """Lines on the type, on inputs and outputs, and on every reason with the nodes it holds for."""
    if types.type is not FloatType.FLOAT32:
        kept = f", {len(types.kept)} stay in float32" if types.kept else ""
        yield f"{types.nodes} nodes compute in {types.type}{kept}"
    groups: dict[str, list[KeptFloat32]] = {}
    for one in types.kept:
        groups.setdefault(_explain(one, types.type), []).append(one)
    for reason, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        shown = members if verbose else members[:_SHOWN]
        rest = f" and {len(members) - len(shown)} more" if len(members) > len(shown) else ""
        yield f"{len(members)} x float32: {reason} ({', '.join(_name(one) for one in shown)}{rest})"
    if types.limited:
        nodes = dict.fromkeys(edge.node for edge in types.limited)
        yield f"{len(nodes)} x masks limited to what {types.type} holds, in front of a Softmax ({next(iter(nodes))})"
    if types.io is not None:
        yield f"inputs and outputs are {types.io}"


def _name(one: KeptFloat32) -> str:
    if one.reason in (KeepReason.OVERFLOW, KeepReason.SUM, KeepReason.SMALL, KeepReason.SCALE):
        return f"{one.node}: {one.figure:.2g}"
    if one.reason in (KeepReason.PRECISION, KeepReason.TRIAL):
        return f"{one.node}: {one.figure:.0f} dB"
    return one.node


def _explain(one: KeptFloat32, kind: FloatType) -> str:
    return {
        KeepReason.OVERFLOW: f"values near or beyond the largest {kind}, {kind.largest:.5g}",
        KeepReason.SUM: f"what it adds up may pass the largest {kind}, {kind.largest:.5g}",
        KeepReason.SMALL: f"values too small for {kind}, which loses digits below {kind.smallest:.2g}",
        KeepReason.PRECISION: f"with inputs rounded to {kind} it makes something else",
        KeepReason.SCALE: f"a scale of what it reads is below {kind.smallest:.2g}, where {kind} loses digits",
        KeepReason.EXISTING: "it reads a pair that the model came with, whose numbers stay as they are",
        KeepReason.KERNEL: one.detail,
        KeepReason.ONNX: f"no {kind} operator in ONNX, or of unknown type",
        KeepReason.SHAPES: "arithmetic on shapes and positions",
        KeepReason.RULE: one.detail,
        KeepReason.UNSEEN: "no sample ran it, so its values are unknown",
        KeepReason.CASTS: "between such nodes: Casts around it would cost more",
        KeepReason.TRIAL: "the answers were worse without it",
    }[one.reason]
