"""The fake-quant kernels without torch: their argument, their sources, their builds.

abi       the argument of every entry point
layout    a tensor's memory as [outer, channels, inner]
launch    choice of CUDA kernels and grids
sources   cuda/ of a checkout or of an installed wheel
cache     compiled files per user, built once and checked before use
compiler  runs compilers as child processes
host      the CPU twin, compiled by the C++ compiler of this machine
nvrtc     NVIDIA's run-time compiler
device    code for a GPU, from a wheel, nvcc or NVRTC
build     all kernels ahead of time
"""

from onnxq.kernels.abi import Call, Divisor, DType, Flag
from onnxq.kernels.build import Built, build_kernels
from onnxq.kernels.device import DeviceImage, device_image
from onnxq.kernels.host import host_library, host_reason, load_host
from onnxq.kernels.launch import THREADS, Launch, Plan, backward_plan, forward_plan
from onnxq.kernels.layout import Layout, find_layout

__all__ = [
    "THREADS",
    "Built",
    "Call",
    "DType",
    "DeviceImage",
    "Divisor",
    "Flag",
    "Launch",
    "Layout",
    "Plan",
    "backward_plan",
    "build_kernels",
    "device_image",
    "find_layout",
    "forward_plan",
    "host_library",
    "host_reason",
    "load_host",
]
