"""The plan: the one artefact between deciding and writing, with its JSON."""

from onnxq.plan.choice import AttentionChoice, AttentionKind, PlacementChoice, PlacementMethod
from onnxq.plan.codec import from_json, to_json
from onnxq.plan.forms import spec_dict
from onnxq.plan.model import SCHEMA, BiasPlan, Bound, Plan, SitePlan
from onnxq.plan.precision import KeepReason, KeptFloat32, PrecisionPlan
from onnxq.plan.scalings import Rotation, Scaling
from onnxq.plan.stale import drop_stale

__all__ = [
    "SCHEMA",
    "AttentionChoice",
    "AttentionKind",
    "BiasPlan",
    "Bound",
    "KeepReason",
    "KeptFloat32",
    "PlacementChoice",
    "PlacementMethod",
    "Plan",
    "PrecisionPlan",
    "Rotation",
    "Scaling",
    "SitePlan",
    "drop_stale",
    "from_json",
    "spec_dict",
    "to_json",
]
