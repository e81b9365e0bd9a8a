"""onnxq: make an ONNX file small and fast without losing its answers.

    import onnxq
    result = onnxq.quantize("model.onnx", "samples.npz")
    result.save("model.q.onnx")

Importing onnxq loads neither onnxruntime nor onnx: names are looked up when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxq.backends import load_config
    from onnxq.config import Config
    from onnxq.errors import OnnxqError
    from onnxq.interop import Imported, Marked, strip_markers
    from onnxq.pipeline import (
        Bench,
        Difference,
        Inspection,
        Part,
        Perplexity,
        Profile,
        Proof,
        Result,
        Variant,
        Variants,
        annotate_bits,
        apply,
        bench,
        calibrate_part,
        diff,
        import_calibration,
        inspect,
        make_plan,
        merge_parts,
        perplexity,
        profile_model,
        prove,
        quantize,
        summarize,
        variants,
    )
    from onnxq.plan import Plan

__version__ = "0.1.0"

_HOME = {
    "Bench": "onnxq.pipeline",
    "Config": "onnxq.config",
    "Difference": "onnxq.pipeline",
    "Imported": "onnxq.interop",
    "Inspection": "onnxq.pipeline",
    "Marked": "onnxq.interop",
    "OnnxqError": "onnxq.errors",
    "Part": "onnxq.pipeline",
    "Perplexity": "onnxq.pipeline",
    "Plan": "onnxq.plan",
    "Profile": "onnxq.pipeline",
    "Proof": "onnxq.pipeline",
    "Result": "onnxq.pipeline",
    "Variant": "onnxq.pipeline",
    "Variants": "onnxq.pipeline",
    "annotate_bits": "onnxq.pipeline",
    "apply": "onnxq.pipeline",
    "bench": "onnxq.pipeline",
    "calibrate_part": "onnxq.pipeline",
    "diff": "onnxq.pipeline",
    "import_calibration": "onnxq.pipeline",
    "inspect": "onnxq.pipeline",
    "load_config": "onnxq.backends",
    "make_plan": "onnxq.pipeline",
    "merge_parts": "onnxq.pipeline",
    "perplexity": "onnxq.pipeline",
    "profile_model": "onnxq.pipeline",
    "prove": "onnxq.pipeline",
    "quantize": "onnxq.pipeline",
    "strip_markers": "onnxq.interop",
    "summarize": "onnxq.pipeline",
    "variants": "onnxq.pipeline",
}

__all__ = [
    "Bench",
    "Config",
    "Difference",
    "Imported",
    "Inspection",
    "Marked",
    "OnnxqError",
    "Part",
    "Perplexity",
    "Plan",
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
    "load_config",
    "make_plan",
    "merge_parts",
    "perplexity",
    "profile_model",
    "prove",
    "quantize",
    "strip_markers",
    "summarize",
    "variants",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxq' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
