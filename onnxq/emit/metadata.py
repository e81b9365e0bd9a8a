"""The plan and the bits of every site as metadata of the model and its nodes."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from onnx import ModelProto, helper

from onnxq.graph import GraphIndex, ModelLike
from onnxq.graph.light import copy_proto, keep_weights
from onnxq.graph.scopes import walk_all_nodes
from onnxq.plan import Plan, SitePlan, SitePlans, to_json
from onnxq.plan.names import QUANTIZE
from onnxq.spec import GRAIN_NAMES

# Keys of the model's metadata, which every engine and most tools keep.
PLAN_KEY = "onnxq.plan"
BITS_KEY = "onnxq.bits"
# Fields of ONNX's messages that say nothing to an engine.
_TEXTS = frozenset({"doc_string", "metadata_props"})

Record = dict[str, str | int]


def describe_site(site: SitePlan) -> Record:
    """The site as a viewer shows it beside a node, and as `annotate` reads it back."""
    return {
        "site": str(site.site),
        "bits": site.spec.bits,
        "scheme": "symmetric" if site.spec.symmetric else "asymmetric",
        "granularity": GRAIN_NAMES[type(site.spec.granularity)],
        "role": str(site.role),
        "rule": site.rule,
    }


def write_plan(plan: Plan) -> str:
    """The plan as compact JSON without scales, zero points, weights and biases."""

    def strip(sites: SitePlans) -> SitePlans:
        return tuple(replace(site, qparams=None, values=None) for site in sites)

    # The numbers stand in the model's own initializers: a second copy could come to contradict them.
    bare = replace(plan, sites=strip(plan.sites), existing=strip(plan.existing), biases=())
    return _dump_compactly(json.loads(to_json(bare)))


def _dump_compactly(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_records(proto: ModelLike, index: GraphIndex) -> dict[str, object]:
    """The records of an earlier run for the nodes that the model still has; {} where they cannot be read."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == BITS_KEY), "{}")
    names = {node.name for node in index.nodes}
    try:
        records = json.loads(text)
        return {name: record for name, record in records.items() if name in names}
    except (json.JSONDecodeError, AttributeError):
        # NOTE: another tool may have damaged the note; `annotate` warns of it, and the pairs do not depend on it.
        return {}


@keep_weights
def leave_out_notes(proto: ModelProto, level: Literal["names", "none"]) -> ModelProto:
    """A copy of the model without the plan, doc strings, and the metadata of all but the model itself.

    level: "names" keeps the names of nodes, and the bits of sites by them; "none" neither. Entries of the model's
    metadata that are not onnxq's stay, because programs read them: names of classes, sizes of images, tokens.
    """
    props = {entry.key: entry.value for entry in proto.metadata_props}
    bits = _read_bits_alone(proto, props.get(BITS_KEY, "{}")) if level == "names" else ""
    props = {key: value for key, value in props.items() if key not in (PLAN_KEY, BITS_KEY)}
    if bits:
        props[BITS_KEY] = bits
    bare = copy_proto(proto)
    _clear_fields(bare, _TEXTS)
    helper.set_model_props(bare, props)
    for node in walk_all_nodes(bare) if level == "none" else ():
        node.ClearField("name")
    return bare


def _read_bits_alone(proto: ModelProto, text: str) -> str:
    """The bits alone of a record of sites, once for each pair; "" where there are none."""
    halves = {node.name for node in walk_all_nodes(proto) if node.op_type == QUANTIZE}
    records = {
        name: {"bits": record["bits"]}
        for name, record in json.loads(text).items()
        if name not in halves and "bits" in record
    }
    return _dump_compactly(records) if records else ""


def _clear_fields(message: Any, names: Collection[str]) -> None:
    """Clear the fields of these names in a message of protobuf and in all that it holds."""
    for field, value in message.ListFields():
        if field.name in names:
            message.ClearField(field.name)
        elif field.type == field.TYPE_MESSAGE:
            for part in value if hasattr(value, "__len__") else (value,):
                _clear_fields(part, names)
