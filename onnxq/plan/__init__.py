"""The plan: the one artefact between deciding and writing, with its JSON."""

from onnxq.plan.forms import spec_dict
from onnxq.plan.model import (
    SCHEMA,
    AttentionChoice,
    AttentionKind,
    BiasPlan,
    Bound,
    KeepReason,
    KeptFloat32,
    PlacementChoice,
    PlacementMethod,
    Plan,
    PrecisionPlan,
    Rotation,
    Scaling,
    SitePlan,
    SitePlans,
)
from onnxq.plan.reading import drop_stale, from_json, to_json

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
    "SitePlans",
    "drop_stale",
    "from_json",
    "spec_dict",
    "to_json",
]
