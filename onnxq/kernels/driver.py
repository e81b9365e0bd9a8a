"""The CUDA driver's functions, called through ctypes."""

import ctypes
import sys
from functools import cache
from typing import Any

# libcuda.so.1 comes with the driver, libcuda.so only with its development files.
_NAMES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")


class DriverError(RuntimeError):
    """A call of the driver failed; the message is CUDA's."""


class CudaDriver:
    """library: the driver; None: the system's. Raises OSError if there is none; all methods raise DriverError."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = library or load_driver()

    def call_driver(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            cause = (text.value or b"unknown error").decode(errors="replace")
            raise DriverError(f"{function} failed: {cause} ({code})")

    def make_handle(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """The handle that a function writes through its first argument."""
        handle = ctypes.c_void_p()
        self.call_driver(function, ctypes.byref(handle), *arguments)
        return handle

    def find_device(self, number: int) -> ctypes.c_int:
        """The driver's name of a GPU."""
        device = ctypes.c_int()
        self.call_driver("cuDeviceGet", ctypes.byref(device), number)
        return device

    def share_context(self, device: ctypes.c_int) -> None:
        """Make the device's primary context current on this thread, which CUDA's runtime uses as well."""
        self.call_driver("cuCtxSetCurrent", self.make_handle("cuDevicePrimaryCtxRetain", device))


@cache
def load_driver() -> ctypes.CDLL:
    """The system's driver. Raises OSError without one."""
    failures = []
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    raise OSError("; ".join(failures))
