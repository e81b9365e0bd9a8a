"""No engine: every node whose operator can be quantized is."""

from onnxq.backends.registry import (
    NO_CPU_KINDS,
    NO_OPERATORS,
    OBSERVER,
    Backend,
    Limit,
    has_positive_scales,
    is_dynamic,
)
from onnxq.backends.virtual.rules import VIRTUAL

LIMITS = (
    Limit(
        "mode",
        lambda c: not is_dynamic(c),
        "this target computes plans with scales, and at no run",
        "write `mode: static` and give samples, or `target: ort`",
    ),
    Limit(
        OBSERVER,
        has_positive_scales,
        "this target stands for engines with positive scales",
        "remove `signed_scales`",
    ),
    Limit(
        "placement",
        lambda c: c.placement == "rules",
        "placements are timed in an engine, and this target is none",
        "write `placement: rules`",
    ),
    NO_CPU_KINDS,
    NO_OPERATORS,
)
BACKEND = Backend(
    name="virtual",
    title="no engine",
    modes={"static": VIRTUAL, "weight-only": VIRTUAL},
    limits=LIMITS,
    aliases=("virtual",),
)
