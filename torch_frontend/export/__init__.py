"""Export to ONNX by identity: every quantizer leaves a marker with its site, from which onnxq makes a plan.

run      the export: `to_onnx`, `export_onnx`
graph    torch.onnx.export with markers, and clean-up of its result
check    the written file against the module
"""

from torch_frontend.export.check import ExportCheck, ExportWarning
from torch_frontend.export.graph import prepare_markers
from torch_frontend.export.run import Exported, export_onnx, to_onnx

__all__ = ["ExportCheck", "ExportWarning", "Exported", "export_onnx", "prepare_markers", "to_onnx"]
