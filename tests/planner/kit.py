"""Small graphs for the planner: their placement problems, and plans as readable tables."""

from typing import Any

import numpy as np
import onnx

from onnxq.backends import load_config
from onnxq.graph import infer_shapes
from onnxq.plan import Plan, SitePlan
from onnxq.planner import OnnxPlacement, state_placement
from onnxq.sites import Role, Site, TensorId
from onnxq.spec import QuantSpec
from tests.networks import parse_text

FORCE = {"op": "*", "set": {"quantize": True}}
# A map of eight channels, and the weight of a pointwise convolution of it.
MAP = "float[1,8,6,6]"
POINT = (8, 8, 1, 1)


def network(text: str, opset: int = 17, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """The model of a "g (…) => (…) {…}" text with typed tensors; nodes are named after their first output.

    shapes: of random weights.
    """
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    proto = parse_text(text, opset=opset, **weights)
    name_by_output(proto.graph)
    return infer_shapes(proto)


def name_by_output(graph: onnx.GraphProto) -> None:
    """Name the nodes of the graph and its bodies after what they make."""
    for node in graph.node:
        node.name = node.name or node.output[0]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                name_by_output(attribute.g)


def draft(proto: onnx.ModelProto, *rules: dict[str, Any], preset: str = "ort-int8", **changes: Any) -> OnnxPlacement:
    """The placement problem of a model, for a preset with these rules and changes."""
    return state_placement(proto, load_config(preset, {"rules": list(rules), **changes}))


def site(where: str | Site, role: Role = Role.ACTIVATION, **fields: Any) -> SitePlan:
    """A site of 8 bits, unless the fields say otherwise."""
    found = TensorId(where) if isinstance(where, str) else where
    return SitePlan(**{"site": found, "role": role, "spec": QuantSpec(), **fields})


def table(plan: Plan) -> dict[str, str]:
    """Site -> its role and its readers ("*": all of them)."""
    found = {}
    for site in plan.sites:
        readers = "*" if site.consumers is None else " ".join(map(str, site.consumers))
        found[str(site.site)] = f"{site.role}: {readers}"
    return found


def groups(plan: Plan) -> set[frozenset[str]]:
    """The sites that share a scale, group by group."""
    found: dict[str, set[str]] = {}
    for site in plan.sites:
        if site.group:
            found.setdefault(site.group, set()).add(str(site.site))
    return set(map(frozenset, found.values()))


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    """Node -> rule and code of the entry that says why it stays float."""
    return {one.subject: (one.rule, one.code) for one in (*plan.refusals, *plan.left_float)}
