"""The few calls of the CUDA driver that timing takes: GPUs, memory, events, and graphs of captured work.

For a process that times and ends: nothing is given back before.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxq.arrays import Array

# Of cuda.h: a stream that does not wait for the default one, and a capture that leaves other threads alone.
_NON_BLOCKING = 1
_THREAD_LOCAL = 1
_NAME_BYTES = 256
Launch = Callable[[], None]


def load_driver() -> Any:
    """The CUDA driver as a ctypes library. Raises OSError without one."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def count_gpus() -> int:
    """GPUs the driver can use; 0 without a driver."""
    try:
        driver = load_driver()
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


class CudaError(Exception):
    """A call of the driver that failed, in the driver's words."""


class Cuda:
    """The first GPU, in the context that CUDA's runtime shares, and a stream on it. Raises CudaError."""

    def __init__(self) -> None:
        try:
            self._driver: Any = load_driver()
        except OSError as error:
            raise CudaError(f"there is no driver ({error})") from error
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", name, _NAME_BYTES, device)
        self.name = name.value.decode(errors="replace")
        # The context that CUDA's runtime, and so TensorRT, uses as well.
        self._call("cuCtxSetCurrent", self._make("cuDevicePrimaryCtxRetain", device))
        self.stream = self._make("cuStreamCreate", _NON_BLOCKING)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(
                f"{function}: {(text.value or b'').decode(errors='replace') or f'error {code}'}"
            )

    def _make(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """The handle that a function writes through its first argument."""
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def allocate(self, size: int) -> int:
        """The address of so many bytes on the GPU."""
        # The driver refuses to allocate nothing.
        return self._make("cuMemAlloc_v2", ctypes.c_size_t(max(size, 1))).value or 0

    def upload(self, array: Array) -> int:
        """The address of a copy of an array on the GPU."""
        whole = np.ascontiguousarray(array)
        address = self.allocate(whole.nbytes)
        source = ctypes.c_void_p(whole.ctypes.data)
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_void_p(address), source, ctypes.c_size_t(whole.nbytes)
        )
        return address

    def make_events(self, count: int) -> list[ctypes.c_void_p]:
        """Events that keep the time at which the GPU came to them."""
        return [self._make("cuEventCreate", 0) for _ in range(count)]

    def record(self, event: ctypes.c_void_p) -> None:
        """Put an event behind the work in the stream."""
        self._call("cuEventRecord", event, self.stream)

    def synchronize(self) -> None:
        """Wait until the stream is done."""
        self._call("cuStreamSynchronize", self.stream)

    def measure(self, first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
        """Seconds between two events that the GPU has passed."""
        found = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(found), first, second)
        # The driver counts milliseconds.
        return found.value / 1e3

    def capture(self, work: Launch) -> Launch:
        """Capture the work that a function puts into the stream as a graph; returns a function that launches it."""
        self._call("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
        graph = ctypes.c_void_p()
        try:
            work()
        finally:
            # A stream that is left in its capture would refuse all other work.
            self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        ready = self._make("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        return lambda: self._call("cuGraphLaunch", ready, self.stream)
