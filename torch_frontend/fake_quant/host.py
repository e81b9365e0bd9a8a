"""The compiled CPU kernels, through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from onnxq.kernels import Call
from torch_frontend.fake_quant.calls import CompiledKernels, Prepared


class HostKernels(CompiledKernels):
    """The library at `path`, on as many threads as torch uses.

    Raises OSError if the library cannot be loaded or speaks another version of the interface.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.fq_cpu_abi() != ctypes.sizeof(Call):
            raise OSError(f"{path} was built for another version of the kernels' interface")
        self._forward, self._backward = library.fq_cpu_forward, library.fq_cpu_backward
        for function in (self._forward, self._backward):
            function.argtypes = (ctypes.POINTER(Call),)

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
