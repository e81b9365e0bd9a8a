"""The plan, the one artefact between deciding and doing."""

from onnxq.plan.codec import from_json, read_spec, spec_dict, to_json
from onnxq.plan.model import SCHEMA, Bound, Plan, SitePlan

__all__ = ["SCHEMA", "Bound", "Plan", "SitePlan", "from_json", "read_spec", "spec_dict", "to_json"]
