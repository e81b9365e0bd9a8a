"""The fake-quant kernels without torch: their argument, their sources, their builds.

abi       the argument of every entry point; a tensor's memory as [outer, channels, inner]
launch    choice of CUDA kernels and grids
sources   cuda/ of a checkout or of an installed wheel; compilers as child processes
cache     compiled files per user, built once and checked before use
host      the CPU twin, compiled by the C++ compiler of this machine
driver    the functions of the CUDA driver
device    code for a GPU, from a wheel, nvcc, or NVRTC, NVIDIA's run-time compiler
build     all kernels ahead of time
"""

from onnxq.kernels.abi import DType, Flag, KernelCall, Layout, find_layout
from onnxq.kernels.build import Built, build_kernels
from onnxq.kernels.device import device_image
from onnxq.kernels.host import host_library, host_reason, load_host
from onnxq.kernels.launch import THREADS, LaunchPlan, backward_plan, forward_plan

__all__ = [
    "THREADS",
    "Built",
    "DType",
    "Flag",
    "KernelCall",
    "LaunchPlan",
    "Layout",
    "backward_plan",
    "build_kernels",
    "device_image",
    "find_layout",
    "forward_plan",
    "host_library",
    "host_reason",
    "load_host",
]
