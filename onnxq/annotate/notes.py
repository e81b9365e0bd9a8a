"""Notes of onnxq in a model about its pairs, read back; a damaged note gives a warning, not an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import NodeProto

from onnxq.annotate.bits import read_noted_bits
from onnxq.annotate.find import Chain
from onnxq.annotate.model import Origin
from onnxq.config.schema import JsonText
from onnxq.emit import BITS_KEY, PLAN_KEY
from onnxq.errors import PlanError
from onnxq.graph import ModelLike
from onnxq.graph.scopes import walk_graphs
from onnxq.plan import Plan, PrecisionPlan, from_json
from onnxq.plan.names import name_part
from onnxq.sites import Caution
from onnxq.spec import QuantSpec

# In front of the keys of node metadata.
NODE_PREFIX = "onnxq."


@dataclass(frozen=True, eq=False)
class Notes:
    """The notes of a model, by the names of nodes."""

    # Records of the model's `onnxq.bits` metadata.
    by_node: Mapping[str, Mapping[str, Any]]
    # `onnxq.*` metadata of the nodes themselves, which some tools drop.
    own: Mapping[str, Mapping[str, str]]
    # Specs of the plan in the model's metadata.
    plan: Mapping[str, QuantSpec]
    # Float types of that plan.
    float_types: PrecisionPlan | None = None
    # Notes that could not be read.
    problems: tuple[Caution, ...] = field(default=())

    def record(self, chain: Chain) -> Mapping[str, Any]:
        """The note of the last node of the chain that has one; {} without any."""
        for source in (self.by_node, self.own):
            for node in reversed(chain.nodes):
                if source.get(node.name):
                    return source[node.name]
        return {}

    def bits(self, chain: Chain) -> tuple[int, Origin] | None:
        """The bits noted for the chain: the model's record, the plan, the node's own metadata, in this order.

        The record comes first because annotate-bits writes it, so it is never older than the plan.
        """
        names = [node.name for node in reversed(chain.nodes)]
        for name in names:
            found = read_noted_bits(self.by_node.get(name))
            if found is not None:
                return found, Origin.METADATA
        for name in names:
            if name in self.plan:
                return self.plan[name].bits, Origin.PLAN
        for name in names:
            found = read_noted_bits(self.own.get(name))
            if found is not None:
                return found, Origin.METADATA
        return None


def read_notes(proto: ModelLike) -> Notes:
    """The notes of onnxq in the model; `problems` names those that cannot be read."""
    held = {entry.key: entry.value for entry in proto.metadata_props}
    problems: list[Caution] = []
    by_node: dict[str, Mapping[str, Any]] = {}
    if BITS_KEY in held:
        try:
            raw = JsonText(BITS_KEY, held[BITS_KEY]).parse(PlanError, "")
            if not isinstance(raw, dict):
                raise PlanError(BITS_KEY, f"is {type(raw).__name__}, not an object", code="Q403")
            records = raw.items()
            by_node = {name: _filter_record(record) for name, record in records if isinstance(record, dict)}
        except PlanError as error:
            text = f"the model's {BITS_KEY} metadata cannot be read ({error.cause}); it is left out of account"
            problems.append(Caution("W106", text))
    plan: dict[str, QuantSpec] = {}
    float_types: PrecisionPlan | None = None
    if PLAN_KEY in held:
        try:
            noted = from_json(held[PLAN_KEY], source=PLAN_KEY)
            plan, float_types = list_specs(noted), noted.precision
        except PlanError as error:
            text = f"the model's {PLAN_KEY} metadata cannot be read ({error.cause}); it is left out of account"
            problems.append(Caution("W106", text))
    nodes = (node for _, graph in walk_graphs(proto.graph) for node in graph.node)
    own = {node.name: notes for node in nodes if (notes := read_node_notes(node))}
    return Notes(by_node, own, plan, float_types, tuple(problems))


def _filter_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record whose types onnxq writes: bits are a number or its text, all others are text."""
    fits = {"bits": (int, str)}
    return {key: value for key, value in record.items() if isinstance(value, fits.get(key, (str,)))}


def list_specs(plan: Plan) -> dict[str, QuantSpec]:
    """The plan's specs by the names of the nodes that `emit` writes for a site."""
    parts = ("q_node", "dq_node")
    return {name_part(site.site, part): site.spec for site in plan.all_sites for part in parts}


def read_node_notes(node: NodeProto) -> dict[str, str]:
    """The `onnxq.*` metadata of a node, without the prefix."""
    found = ((entry.key, entry.value) for entry in node.metadata_props)
    return {key.removeprefix(NODE_PREFIX): value for key, value in found if key.startswith(NODE_PREFIX)}
