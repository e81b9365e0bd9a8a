"""The compiled CPU kernels, through ctypes."""

from __future__ import annotations

import ctypes

import torch

from torch_frontend.fake_quant.calls import CompiledKernels, Prepared


class HostKernels(CompiledKernels):
    """Kernels of the library from `onnxq.kernels.load_host`, on as many threads as torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forward, self._backward = library.fq_cpu_forward, library.fq_cpu_backward

    def run_forward(self, prepared: Prepared) -> None:
        """Fill y."""
        # Read at every call: the user may change it with torch.set_num_threads.
        prepared.call.threads = torch.get_num_threads()
        _check_code(self._forward(prepared.call))

    def run_backward(self, prepared: Prepared) -> None:
        """Fill dx, dscale and dzero_point."""
        prepared.call.threads = torch.get_num_threads()
        _check_code(self._backward(prepared.call))


def _check_code(code: int) -> None:
    # The kernels' only failure: std::bad_alloc must not cross the C interface.
    if code:
        raise MemoryError("fake_quantize: no memory for partial sums")
