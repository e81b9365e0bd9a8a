"""Export to ONNX by identity: every quantizer leaves a marker that names it, and onnxq makes of those a plan.

run      the export: `to_onnx`, `export_onnx`
marking  numbers fixed and weights baked while torch exports
graph    torch.onnx.export, and its result tidied
files    all files of an export, or none
"""

from torch_frontend.export.marking import marking
from torch_frontend.export.run import Exported, export_onnx, to_onnx

__all__ = ["Exported", "export_onnx", "marking", "to_onnx"]
