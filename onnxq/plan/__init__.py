"""The plan: the one artefact between deciding and writing, with its JSON."""

from onnxq.plan.contents import Contents, NodeContents, Sketch, sketch_values
from onnxq.plan.model import (
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
from onnxq.plan.names import PARTS, name_part
from onnxq.plan.reading import check_numbers, check_specs, drop_stale, from_json, to_json

__all__ = [
    "PARTS",
    "AttentionChoice",
    "AttentionKind",
    "BiasPlan",
    "Bound",
    "Contents",
    "KeepReason",
    "KeptFloat32",
    "NodeContents",
    "PlacementChoice",
    "PlacementMethod",
    "Plan",
    "PrecisionPlan",
    "Rotation",
    "Scaling",
    "SitePlan",
    "SitePlans",
    "Sketch",
    "check_numbers",
    "check_specs",
    "drop_stale",
    "from_json",
    "name_part",
    "sketch_values",
    "to_json",
]
