"""The CUDA kernels: loaded once per device when its first tensor arrives, started on torch's current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from onnxq.kernels import Call
from torch_frontend.fake_quant.driver import Driver
from torch_frontend.fake_quant.planned import PlannedKernels

# "sm_90" -> a cubin or fatbin with code for it.
Images = Callable[[str], bytes]


class CudaKernels(PlannedKernels):
    """Kernels from the images that `images` finds or builds.

    `ready` must have loaded those of a device before anything is launched on it.
    """

    def __init__(self, driver: Driver, images: Images) -> None:
        self._driver, self._images = driver, images
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def ready(self, device: torch.device) -> None:
        """Load the kernels of `device` unless they are.

        Raises what `images` does, DriverError, and RuntimeError while a graph is captured: loading is not for graphs.
        """
        with self._lock, torch.cuda.device(device):
            index = torch.cuda.current_device()
            if index in self._modules:
                return
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the fake-quant kernels are not loaded yet: run the model once, then capture it")
            major, minor = torch.cuda.get_device_capability(index)
            image = self._images(f"sm_{major}{minor}")
            self._driver.enter(index)
            self._modules[index] = self._driver.load(image)

    def launch(self, kernel: str, grid: int, call: Call, device: torch.device) -> None:
        """Start a kernel on the current stream of `device`."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if torch.cuda.current_device() == index:
            self._start(index, kernel, grid, call)
        else:
            with torch.cuda.device(index):
                self._start(index, kernel, grid, call)

    def _start(self, index: int, kernel: str, grid: int, call: Call) -> None:
        self._driver.enter(index)
        function = self._functions.get((index, kernel))
        if function is None:
            function = self._functions[index, kernel] = self._driver.function(self._modules[index], kernel)
        self._driver.launch(function, grid, call, torch.cuda.current_stream(index).cuda_stream)
