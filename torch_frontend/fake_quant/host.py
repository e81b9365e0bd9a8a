"""The compiled CPU kernels, through ctypes."""

from __future__ import annotations

import ctypes

import torch

from torch_frontend.fake_quant.calls import CompiledKernels, Prepared


class HostKernels(CompiledKernels):
    """The library that `onnxq.kernels.load_host` gives, on as many threads as torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forward, self._backward = library.fq_cpu_forward, library.fq_cpu_backward

    def run_forward(self, prepared: Prepared) -> None:
        """Fill y."""
        prepared.call.threads = torch.get_num_threads()
        _checked(self._forward(prepared.call))

    def run_backward(self, prepared: Prepared) -> None:
        """Fill dx, dscale and dzero_point."""
        prepared.call.threads = torch.get_num_threads()
        _checked(self._backward(prepared.call))


def _checked(code: int) -> None:
    if code:
        raise MemoryError("fake_quantize: no memory for partial sums")
