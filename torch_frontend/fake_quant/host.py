"""The compiled CPU kernels, through ctypes."""

from __future__ import annotations

import ctypes

import torch

from torch_frontend.fake_quant.calls import CompiledKernels, Prepared


class HostKernels(CompiledKernels):
    """Kernels of the library from `onnxq.kernels.load_host`, on as many threads as torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forward, self._backward = library.fq_cpu_forward, library.fq_cpu_backward

    def run(self, prepared: Prepared) -> None:
        """Fill the outputs."""
        # Read at every call: the user may change it with torch.set_num_threads.
        prepared.call.threads = torch.get_num_threads()
        # The kernels' only failure: std::bad_alloc must not cross the C interface.
        if (self._backward if prepared.backward else self._forward)(prepared.call):
            raise MemoryError("fake_quantize: no memory for partial sums")
