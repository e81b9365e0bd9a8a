"""No engine: every node whose operator can be quantized is."""
