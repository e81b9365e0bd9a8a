"""What is shown to people: summaries, plans, tables, JSON and progress; made from reports, never from a graph."""

from onnxq.report.diffs import difference_json, show_difference
from onnxq.report.document import report_json, to_json
from onnxq.report.imports import import_json, show_import
from onnxq.report.kernels import kernels_json, show_kernels
from onnxq.report.live import Progress, Task, progress, silent
from onnxq.report.model import LOST_DB, Latency, OpCount, OutputCheck, Report, SiteLine, StageCost
from onnxq.report.pairs import inspection_json, show_inspection
from onnxq.report.plans import show_plan, site_line, spec_text
from onnxq.report.profiles import profile_json, show_profile
from onnxq.report.promotions import Promotion, PromotionStep
from onnxq.report.proofs import proof_json, show_proof
from onnxq.report.summary import show_report
from onnxq.report.terminal import seconds as duration

__all__ = [
    "LOST_DB",
    "Latency",
    "OpCount",
    "OutputCheck",
    "Progress",
    "Promotion",
    "PromotionStep",
    "Report",
    "SiteLine",
    "StageCost",
    "Task",
    "difference_json",
    "duration",
    "import_json",
    "inspection_json",
    "kernels_json",
    "profile_json",
    "progress",
    "proof_json",
    "report_json",
    "show_difference",
    "show_import",
    "show_inspection",
    "show_kernels",
    "show_plan",
    "show_profile",
    "show_proof",
    "show_report",
    "silent",
    "site_line",
    "spec_text",
    "to_json",
]
