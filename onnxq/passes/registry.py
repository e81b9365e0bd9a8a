"""All passes in the order in which they run."""

from __future__ import annotations

from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names
from onnxq.passes.base import Pass
from onnxq.passes.equalization.passes import EQUALIZATION
from onnxq.passes.mixed_precision.attention import ATTENTION, ATTENTION_AGAIN
from onnxq.passes.mixed_precision.dynamic_scales import DYNAMIC_SCALES
from onnxq.passes.mixed_precision.embeddings import EMBEDDINGS
from onnxq.passes.mixed_precision.float_ops import FLOAT_OPS
from onnxq.passes.mixed_precision.float_types import FLOAT_TYPES
from onnxq.passes.mixed_precision.promotion import PROMOTION, ROUNDING_AGAIN
from onnxq.passes.mixed_precision.sensitive_ops import SENSITIVE_OPS
from onnxq.passes.mixed_precision.weight_bits import WEIGHT_BITS
from onnxq.passes.ranges.passes import RANGES
from onnxq.passes.rewrites.passes import REWRITES
from onnxq.passes.rounding.passes import ROUNDING
from onnxq.passes.rounding.samples import AUGMENTED

PASSES: tuple[Pass, ...] = (
    *REWRITES,
    *EQUALIZATION,
    # Before whatever judges plans by their outputs: those of wrong ranges say little.
    *RANGES,
    FLOAT_OPS,
    DYNAMIC_SCALES,
    SENSITIVE_OPS,
    # Widths and places of pairs before weights are rounded for them.
    WEIGHT_BITS,
    ATTENTION,
    *ROUNDING,
    ATTENTION_AGAIN,
    # Judged beside the errors that are left, and before a request for accuracy is met.
    EMBEDDINGS,
    # Last, as it pays in speed for what all others could not mend; weights are then rounded for what is left.
    PROMOTION,
    ROUNDING_AGAIN,
    FLOAT_TYPES,
)
# All that `skip` may name: the passes, and a part of one.
SKIPPABLE = frozenset((AUGMENTED, *(entry.name for entry in PASSES)))


def check_skip(config: Config) -> None:
    """ConfigError, with file and line, for a name in `skip` that no pass has."""
    for k, name in enumerate(config.skip):
        if name not in SKIPPABLE:
            raise ConfigError(
                config.where(f"skip[{k}]"), f"no pass is called {name!r}", suggest_names(name, SKIPPABLE), code="Q320"
            )
