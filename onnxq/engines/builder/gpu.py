"""The NVIDIA GPUs of this machine, asked of the driver."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


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
