"""quantize(): the one orchestration, and the other commands' functions, which load their modules at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxq.annotate import Inspection
from onnxq.pipeline.api import annotate_bits, apply, import_calibration, inspect, make_plan, quantize
from onnxq.pipeline.result import Result, summarize

if TYPE_CHECKING:
    from onnxq.calibrate.parts import Part
    from onnxq.engines.bench import Bench
    from onnxq.engines.diff.model import Difference
    from onnxq.engines.prove.proof import Proof
    from onnxq.evaluation.perplexity import Perplexity
    from onnxq.evaluation.profile import Profile
    from onnxq.pipeline.bench_models import bench
    from onnxq.pipeline.diff_models import diff
    from onnxq.pipeline.make_variants import variants
    from onnxq.pipeline.measure_perplexity import perplexity
    from onnxq.pipeline.profile_layers import profile_model
    from onnxq.pipeline.prove_model import prove
    from onnxq.pipeline.scale.shards import calibrate_part, merge_parts
    from onnxq.report.variants import Variant, Variants

_HOME = {
    "Bench": "onnxq.engines.bench",
    "Difference": "onnxq.engines.diff.model",
    "Part": "onnxq.calibrate.parts",
    "Perplexity": "onnxq.evaluation.perplexity",
    "Profile": "onnxq.evaluation.profile",
    "Proof": "onnxq.engines.prove.proof",
    "Variant": "onnxq.report.variants",
    "Variants": "onnxq.report.variants",
    "bench": "onnxq.pipeline.bench_models",
    "calibrate_part": "onnxq.pipeline.scale.shards",
    "diff": "onnxq.pipeline.diff_models",
    "merge_parts": "onnxq.pipeline.scale.shards",
    "perplexity": "onnxq.pipeline.measure_perplexity",
    "profile_model": "onnxq.pipeline.profile_layers",
    "prove": "onnxq.pipeline.prove_model",
    "variants": "onnxq.pipeline.make_variants",
}

__all__ = [
    "Bench",
    "Difference",
    "Inspection",
    "Part",
    "Perplexity",
    "Profile",
    "Proof",
    "Result",
    "Variant",
    "Variants",
    "annotate_bits",
    "apply",
    "bench",
    "calibrate_part",
    "diff",
    "import_calibration",
    "inspect",
    "make_plan",
    "merge_parts",
    "perplexity",
    "profile_model",
    "prove",
    "quantize",
    "summarize",
    "variants",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
