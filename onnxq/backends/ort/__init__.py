"""ONNX Runtime on CPUs."""
