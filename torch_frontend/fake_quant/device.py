"""The CUDA kernels: loaded once per device when its first tensor arrives, launched on torch's current stream."""

import ctypes
import threading
from collections.abc import Callable

import torch

from onnxq.kernels import THREADS, KernelCall
from onnxq.kernels.driver import CudaDriver
from torch_frontend.fake_quant.calls import PlannedKernels


class Driver(CudaDriver):
    """Loads kernels and launches them in the current context."""

    def enter_context(self, device: int) -> None:
        """Make the device's primary context current on this thread if no context is."""
        # torch makes the primary context current on its own threads; autograd's and the user's may have none yet.
        if self.make_handle("cuCtxGetCurrent").value is None:
            # Never released: torch keeps the primary context until the process ends, too.
            self.share_context(self.find_device(device))

    def load_module(self, image: bytes) -> ctypes.c_void_p:
        """Load a cubin or fatbin; return its CUmodule."""
        return self.make_handle("cuModuleLoadData", ctypes.c_char_p(image))

    def find_function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """CUfunction of a kernel in a module."""
        return self.make_handle("cuModuleGetFunction", module, ctypes.c_char_p(name.encode()))

    def launch_kernel(
        self, function: ctypes.c_void_p, grid: int, call: KernelCall, stream: int
    ) -> None:
        """Queue a kernel with `grid` blocks on a stream; the driver copies the argument before this returns."""
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        # Blocks and threads along three axes, and bytes of shared memory.
        sizes = map(ctypes.c_uint, (grid, 1, 1, THREADS, 1, 1, 0))
        self.call_driver(
            "cuLaunchKernel", function, *sizes, ctypes.c_void_p(stream), argument, None
        )


# Architecture ("sm_90") -> a cubin or fatbin with code for it.
Images = Callable[[str], bytes]


class CudaKernels(PlannedKernels):
    """Kernels launched through `driver`, from the images that `images` finds or builds.

    `load_kernels` must have been called for a device before anything is launched on it.
    """

    def __init__(self, driver: Driver, images: Images) -> None:
        self._driver = driver
        self._images = images
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        # Several threads may bring the first tensor of a device at once; its module is loaded once.
        self._lock = threading.Lock()

    def load_kernels(self, device: torch.device) -> None:
        """Load the kernels of `device` unless they are loaded.

        Raises the errors of `images`, DriverError, and RuntimeError while a CUDA graph is captured.
        """
        with self._lock, torch.cuda.device(device):
            index = torch.cuda.current_device()
            if index in self._modules:
                return
            # cuModuleLoadData is not allowed during capture and would spoil the user's graph.
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the fake-quant kernels are not loaded yet: run the model once, then capture it"
                )
            major, minor = torch.cuda.get_device_capability(index)
            image = self._images(f"sm_{major}{minor}")
            self._driver.enter_context(index)
            self._modules[index] = self._driver.load_module(image)

    def launch_kernel(self, kernel: str, grid: int, call: KernelCall, device: torch.device) -> None:
        """Launch a kernel on the current stream of `device`."""
        index = torch.cuda.current_device() if device.index is None else device.index
        # torch's current device decides on the context, so the device is switched where it is another.
        if torch.cuda.current_device() == index:
            self._launch_on(index, kernel, grid, call)
        else:
            with torch.cuda.device(index):
                self._launch_on(index, kernel, grid, call)

    def _launch_on(self, index: int, kernel: str, grid: int, call: KernelCall) -> None:
        self._driver.enter_context(index)
        function = self._functions.get((index, kernel))
        if function is None:
            function = self._functions[index, kernel] = self._driver.find_function(
                self._modules[index], kernel
            )
        self._driver.launch_kernel(
            function, grid, call, torch.cuda.current_stream(index).cuda_stream
        )
