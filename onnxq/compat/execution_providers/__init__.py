"""Recipes for execution providers, where onnxruntime.quantization has them."""
