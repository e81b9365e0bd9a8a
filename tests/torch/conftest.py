"""One thread for torch, as for every other library under test; what it sets up for every export, set up once."""

import contextlib
from functools import cache

with contextlib.suppress(ImportError, AttributeError):
    import torch

    torch.set_num_threads(1)

    # Parses the sources of 500 translations, half the time of exporting a small network. Nobody changes a registry.
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))
