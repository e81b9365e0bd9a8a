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
    from onnxq.annotate import Inspection as Inspection
    from onnxq.backends import load_config as load_config
    from onnxq.calibrate.parts import Part as Part
    from onnxq.commands.apply import apply as apply
    from onnxq.commands.bench import bench as bench
    from onnxq.commands.compare import Comparison as Comparison
    from onnxq.commands.compare import compare as compare
    from onnxq.commands.convert import Conversion as Conversion
    from onnxq.commands.convert import convert as convert
    from onnxq.commands.diff import diff as diff
    from onnxq.commands.export_calibration import export_calibration as export_calibration
    from onnxq.commands.import_calibration import import_calibration as import_calibration
    from onnxq.commands.import_weights import ImportedWeights as ImportedWeights
    from onnxq.commands.import_weights import import_weights as import_weights
    from onnxq.commands.inspect import annotate_bits as annotate_bits
    from onnxq.commands.inspect import inspect as inspect
    from onnxq.commands.perplexity import perplexity as perplexity
    from onnxq.commands.plan import make_plan as make_plan
    from onnxq.commands.profile import profile_model as profile_model
    from onnxq.commands.prove import prove as prove
    from onnxq.commands.quantize import quantize as quantize
    from onnxq.commands.report import make_report as make_report
    from onnxq.commands.results import render_html as render_html
    from onnxq.commands.results import summarize as summarize
    from onnxq.commands.search import search as search
    from onnxq.commands.shards import calibrate_part as calibrate_part
    from onnxq.commands.shards import merge_parts as merge_parts
    from onnxq.commands.variants.make import variants as variants
    from onnxq.commands.variants.result import Variant as Variant
    from onnxq.commands.variants.result import Variants as Variants
    from onnxq.config import Config as Config
    from onnxq.engines.bench import Bench as Bench
    from onnxq.engines.diff.model import Difference as Difference
    from onnxq.engines.prove.proof import Proof as Proof
    from onnxq.errors import OnnxqError as OnnxqError
    from onnxq.evaluation.perplexity import Perplexity as Perplexity
    from onnxq.evaluation.sensitivity import Profile as Profile
    from onnxq.interop import ExportedScales as ExportedScales
    from onnxq.interop import Imported as Imported
    from onnxq.interop import Marked as Marked
    from onnxq.interop import strip_markers as strip_markers
    from onnxq.pipeline.finalize import Result as Result
    from onnxq.pipeline.search import SearchResult as SearchResult
    from onnxq.plan import Plan as Plan
    from onnxq.report.record import ReportRecord as ReportRecord
    from onnxq.report.record import read_record as read_record

__version__ = "0.1.0"

# The public names of each module; the imports above are for type checkers, and a test holds both to be the same.
_NAMES = {
    "annotate": "Inspection",
    "backends": "load_config",
    "calibrate.parts": "Part",
    "commands.apply": "apply",
    "commands.bench": "bench",
    "commands.compare": "Comparison compare",
    "commands.convert": "Conversion convert",
    "commands.diff": "diff",
    "commands.export_calibration": "export_calibration",
    "commands.import_calibration": "import_calibration",
    "commands.import_weights": "ImportedWeights import_weights",
    "commands.inspect": "annotate_bits inspect",
    "commands.perplexity": "perplexity",
    "commands.plan": "make_plan",
    "commands.profile": "profile_model",
    "commands.prove": "prove",
    "commands.quantize": "quantize",
    "commands.report": "make_report",
    "commands.results": "render_html summarize",
    "commands.search": "search",
    "commands.shards": "calibrate_part merge_parts",
    "commands.variants.make": "variants",
    "commands.variants.result": "Variant Variants",
    "config": "Config",
    "engines.bench": "Bench",
    "engines.diff.model": "Difference",
    "engines.prove.proof": "Proof",
    "errors": "OnnxqError",
    "evaluation.perplexity": "Perplexity",
    "evaluation.sensitivity": "Profile",
    "interop": "ExportedScales Imported Marked strip_markers",
    "pipeline.finalize": "Result",
    "pipeline.search": "SearchResult",
    "plan": "Plan",
    "report.record": "ReportRecord read_record",
}
_HOMES = {name: f"onnxq.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxq' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
