"""Patterns that end in one node replaced by an operation that says the same, raising the opset where it must."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from onnxq.errors import OnnxqError
from onnxq.graph import ModelLike, NodeRef, find_opset, infer_shapes, upgrade_opset
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.view import View
from onnxq.sites import Refusal, TensorId

# Above opset 20 ORT refuses some int8 graphs that are fine below, and no pattern here needs more.
NEWEST = 20
_FIX = "export the model with a newer opset"


@dataclass(frozen=True, eq=False)
class Replacement:
    """`last` becomes `op_type` reading `inputs` and, behind them, new constants; the other `nodes` go.

    opset: the version of the standard domain (or of `domain`) that brought the operation.
    """

    last: NodeRef
    nodes: frozenset[str]
    op_type: str
    inputs: tuple[TensorId, ...]
    attrs: Mapping[str, Any]
    domain: str = ""
    opset: int = 1
    constants: Mapping[str, NDArray[Any]] = field(default_factory=dict)


Finder = Callable[[View], list[Replacement]]


def apply_replacements(proto: ModelLike, name: str, find: Finder) -> tuple[ModelLike, PassReport]:
    """Apply all that a finder finds. Those that need a newer opset than the model can have are left and reported."""
    matches = find(View(proto))
    # Once for all matches: a conversion of the opset may rewrite any node, so they are looked for again behind it.
    proto, failure = _raise_opset(proto, matches)
    version = find_opset(proto)
    skipped = tuple(
        Refusal(match.last.name, f"{match.op_type} needs opset {match.opset}: {failure}", _FIX, name, "R112")
        for match in matches
        if not match.domain and match.opset > version
    )
    if matches:
        matches = [match for match in find(View(proto)) if match.domain or match.opset <= version]
    edit, changed = Edit(proto), []
    for match in matches:
        last = match.last
        made = (edit.constant(last.scope, f"{last.name}/{key}", value) for key, value in match.constants.items())
        inputs = [*(tensor.name for tensor in match.inputs), *made]
        edit.become(last, match.op_type, inputs, match.attrs, match.domain)
        changed.append(f"{last.name}: {match.op_type} instead of {len(match.nodes)} nodes")
    return edit.finish(name, changed, skipped)


def _raise_opset(proto: ModelLike, matches: list[Replacement]) -> tuple[ModelLike, str]:
    """The model at the highest opset its matches need and it can be converted to, and why not higher."""
    failure = ""
    needed = {match.opset for match in matches if not match.domain and find_opset(proto) < match.opset <= NEWEST}
    for version in sorted(needed, reverse=True):
        try:
            return infer_shapes(upgrade_opset(proto, version)), failure
        except OnnxqError as error:
            # The first is that of the newest version, which would have served all matches.
            failure = failure or error.cause
    return proto, failure
