"""Output for people: summaries, plans, tables, JSON and progress, made from typed results and never from a graph.

Tables of single commands are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxq.progress import Progress, Task, silent
from onnxq.report.document import report_json, to_json
from onnxq.report.live import open_display, show_progress
from onnxq.report.model import Latency, OpCount, OutputCheck, Report, SiteLine
from onnxq.report.plans import format_spec, make_site_line, placement_text, show_plan
from onnxq.report.promotions import describe_promotion
from onnxq.report.summary import show_report
from onnxq.report.terminal import format_seconds as duration

if TYPE_CHECKING:
    from onnxq.report.benches import bench_json, show_bench
    from onnxq.report.diffs import describe_unmet, difference_json, show_difference
    from onnxq.report.imports import import_json, show_import
    from onnxq.report.kernels import kernels_json, show_kernels
    from onnxq.report.pairs import inspection_json, show_inspection
    from onnxq.report.profiles import profile_json, show_profile
    from onnxq.report.proofs import proof_json, show_proof
    from onnxq.report.sums import saturation_summary

_HOME = {
    "bench_json": "onnxq.report.benches",
    "describe_unmet": "onnxq.report.diffs",
    "difference_json": "onnxq.report.diffs",
    "import_json": "onnxq.report.imports",
    "inspection_json": "onnxq.report.pairs",
    "kernels_json": "onnxq.report.kernels",
    "profile_json": "onnxq.report.profiles",
    "proof_json": "onnxq.report.proofs",
    "saturation_summary": "onnxq.report.sums",
    "show_bench": "onnxq.report.benches",
    "show_difference": "onnxq.report.diffs",
    "show_import": "onnxq.report.imports",
    "show_inspection": "onnxq.report.pairs",
    "show_kernels": "onnxq.report.kernels",
    "show_profile": "onnxq.report.profiles",
    "show_proof": "onnxq.report.proofs",
}

__all__ = [
    "Latency",
    "OpCount",
    "OutputCheck",
    "Progress",
    "Report",
    "SiteLine",
    "Task",
    "bench_json",
    "describe_promotion",
    "describe_unmet",
    "difference_json",
    "duration",
    "format_spec",
    "import_json",
    "inspection_json",
    "kernels_json",
    "make_site_line",
    "open_display",
    "placement_text",
    "profile_json",
    "proof_json",
    "report_json",
    "saturation_summary",
    "show_bench",
    "show_difference",
    "show_import",
    "show_inspection",
    "show_kernels",
    "show_plan",
    "show_profile",
    "show_progress",
    "show_proof",
    "show_report",
    "silent",
    "to_json",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
