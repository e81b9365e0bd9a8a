"""The plan, the one artefact between deciding and doing."""

from onnxq.plan.codec import from_json, read_spec, spec_dict, to_json
from onnxq.plan.model import SCHEMA, BiasPlan, Bound, Plan, SitePlan
from onnxq.plan.scalings import Scaling

__all__ = [
    "SCHEMA",
    "BiasPlan",
    "Bound",
    "Plan",
    "Scaling",
    "SitePlan",
    "from_json",
    "read_spec",
    "spec_dict",
    "to_json",
]
