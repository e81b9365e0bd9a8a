"""The plan and the bits of every site as metadata of the model and its nodes."""

from __future__ import annotations

import json
from dataclasses import replace

from onnxq.graph import GraphIndex, ModelLike
from onnxq.plan import Plan, SitePlan, to_json
from onnxq.spec import GRAIN_NAMES

# Keys of the model's metadata, which every engine and most tools keep.
PLAN_KEY = "onnxq.plan"
BITS_KEY = "onnxq.bits"

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

    def strip(sites: tuple[SitePlan, ...]) -> tuple[SitePlan, ...]:
        return tuple(replace(site, qparams=None, values=None) for site in sites)

    # The numbers stand in the model's own initializers: a second copy could come to contradict them.
    bare = replace(plan, sites=strip(plan.sites), existing=strip(plan.existing), biases=())
    return json.dumps(json.loads(to_json(bare)), ensure_ascii=False, separators=(",", ":"))


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
