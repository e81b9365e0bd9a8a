"""Export to ONNX by identity: every quantizer leaves a marker with its site, from which onnxq makes a plan.

run      the export: `to_onnx`, `export_onnx`
marking  qparams fixed and weights baked while torch exports
graph    torch.onnx.export, and clean-up of its result
sums     warnings for weights that the file rounds otherwise than training did
files    all files of an export, or none
check    the written file against the module
"""

from torch_frontend.export.check import ExportCheck, ExportWarning
from torch_frontend.export.marking import prepare_markers
from torch_frontend.export.run import Exported, export_onnx, to_onnx

__all__ = ["ExportCheck", "ExportWarning", "Exported", "export_onnx", "prepare_markers", "to_onnx"]
