"""The few calls of the CUDA driver that timing takes: GPUs, memory, events, and graphs of captured work.

For a process that times and ends: nothing is given back before.
"""

import ctypes
from collections.abc import Callable

import numpy as np

from onnxq.arrays import Array
from onnxq.kernels.driver import CudaDriver, DriverError

# Of cuda.h: a stream that does not wait for the default one, and a capture that leaves other threads alone.
_NON_BLOCKING = 1
_THREAD_LOCAL = 1
_NAME_BYTES = 256
Launch = Callable[[], None]


def count_gpus() -> int:
    """GPUs the driver can use; 0 without a driver."""
    count = ctypes.c_int()
    try:
        driver = CudaDriver()
        driver.call_driver("cuInit", 0)
        driver.call_driver("cuDeviceGetCount", ctypes.byref(count))
    except (OSError, DriverError):
        return 0
    return count.value


class Cuda(CudaDriver):
    """The first GPU, in the context that CUDA's runtime, and so TensorRT, uses as well, and a stream on it.

    Raises DriverError.
    """

    def __init__(self) -> None:
        try:
            super().__init__()
        except OSError as error:
            raise DriverError(f"there is no driver ({error})") from error
        self.call_driver("cuInit", 0)
        device = self.find_device(0)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call_driver("cuDeviceGetName", name, _NAME_BYTES, device)
        self.name = name.value.decode(errors="replace")
        self.share_context(device)
        self.stream = self.make_handle("cuStreamCreate", _NON_BLOCKING)

    def allocate(self, size: int) -> int:
        """The address of so many bytes on the GPU."""
        # The driver refuses to allocate nothing.
        return self.make_handle("cuMemAlloc_v2", ctypes.c_size_t(max(size, 1))).value or 0

    def upload(self, array: Array) -> int:
        """The address of a copy of an array on the GPU."""
        whole = np.ascontiguousarray(array)
        address = self.allocate(whole.nbytes)
        source = ctypes.c_void_p(whole.ctypes.data)
        self.call_driver(
            "cuMemcpyHtoD_v2", ctypes.c_void_p(address), source, ctypes.c_size_t(whole.nbytes)
        )
        return address

    def make_events(self, count: int) -> list[ctypes.c_void_p]:
        """Events that keep the time at which the GPU came to them."""
        return [self.make_handle("cuEventCreate", 0) for _ in range(count)]

    def record(self, event: ctypes.c_void_p) -> None:
        """Put an event behind the work in the stream."""
        self.call_driver("cuEventRecord", event, self.stream)

    def synchronize(self) -> None:
        """Wait until the stream is done."""
        self.call_driver("cuStreamSynchronize", self.stream)

    def measure(self, first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
        """Seconds between two events that the GPU has passed."""
        found = ctypes.c_float()
        self.call_driver("cuEventElapsedTime", ctypes.byref(found), first, second)
        # The driver counts milliseconds.
        return found.value / 1e3

    def capture(self, work: Launch) -> Launch:
        """Capture the work that a function puts into the stream as a graph; returns a function that launches it."""
        self.call_driver("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
        graph = ctypes.c_void_p()
        try:
            work()
        finally:
            # A stream that is left in its capture would refuse all other work.
            self.call_driver("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        ready = self.make_handle("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        return lambda: self.call_driver("cuGraphLaunch", ready, self.stream)
