"""Output for people: summaries, plans, tables, JSON and progress, made from typed results and never from a graph.

Tables of single commands are imported from their modules.
"""

from onnxq.progress import Progress, silent
from onnxq.report.document import report_json, to_json
from onnxq.report.live import open_display, show_progress
from onnxq.report.model import Latency, OpCount, OutputCheck, Report, SiteLine
from onnxq.report.plans import format_spec, make_site_line, placement_text, show_plan
from onnxq.report.promotions import find_unmet_accuracy
from onnxq.report.summary import show_report
from onnxq.report.terminal import View

__all__ = [
    "Latency",
    "OpCount",
    "OutputCheck",
    "Progress",
    "Report",
    "SiteLine",
    "View",
    "find_unmet_accuracy",
    "format_spec",
    "make_site_line",
    "open_display",
    "placement_text",
    "report_json",
    "show_plan",
    "show_progress",
    "show_report",
    "silent",
    "to_json",
]
