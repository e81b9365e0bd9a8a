"""Qualcomm's NPU (HTP), by onnxruntime-qnn."""
