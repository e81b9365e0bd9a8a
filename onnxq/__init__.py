"""onnxq: make an ONNX file small and fast without losing its answers."""
