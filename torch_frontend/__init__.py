"""The PyTorch front end: for networks that need training to survive quantization. Needs `onnxq[torch]`."""
