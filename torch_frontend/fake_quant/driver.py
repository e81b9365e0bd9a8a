"""The functions of the CUDA driver that load a kernel and launch it, through ctypes."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from onnxq.kernels import THREADS, Call

# libcuda.so.1 comes with the driver, libcuda.so only with its development files.
_NAMES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")


class DriverError(RuntimeError):
    """A call of the driver failed; the message is CUDA's."""


class Driver:
    """cuModuleLoadData, cuModuleGetFunction and cuLaunchKernel in the current context.

    library: the driver; None: the system's. Raises OSError if there is none, DriverError if a call fails.
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = library or _load_library()

    def enter_context(self, device: int) -> None:
        """Make the device's primary context current on this thread if no context is."""
        # torch makes the primary context current on its own threads; autograd's and the user's may have none yet.
        context, ordinal = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            self._call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
            # Never released: torch keeps the primary context until the process ends, too.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._call("cuCtxSetCurrent", context)

    def load_module(self, image: bytes) -> ctypes.c_void_p:
        """Load a cubin or fatbin; return its CUmodule."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        return module

    def find_function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """CUfunction of a kernel in a module."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        return function

    def launch_kernel(self, function: ctypes.c_void_p, grid: int, call: Call, stream: int) -> None:
        """Queue a kernel with `grid` blocks on a stream; the driver copies the argument before this returns."""
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        # Blocks and threads along three axes, and bytes of shared memory.
        sizes = (ctypes.c_uint(size) for size in (grid, 1, 1, THREADS, 1, 1, 0))
        self._call("cuLaunchKernel", function, *sizes, ctypes.c_void_p(stream), argument, None)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")


@cache
def _load_library() -> ctypes.CDLL:
    failures = []
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    raise OSError("; ".join(failures))
