"""16-bit sums that saturate on x86 CPUs without VNNI: how often they do, and what that costs, computed on any machine."""

from onnxq.engines.saturation.emulate import Emulation, emulate
from onnxq.engines.saturation.measure import Cost, NodeCost, OutputCost, measure
from onnxq.engines.saturation.text import explain, summary

__all__ = ["Cost", "Emulation", "NodeCost", "OutputCost", "emulate", "explain", "measure", "summary"]
