"""The implementation that each device gets in this process, chosen when its first tensor arrives."""

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onnxq.errors import OnnxqError
from onnxq.kernels import device_image, host_reason, load_host
from onnxq.kernels.driver import DriverError
from torch_frontend.fake_quant import reference
from torch_frontend.fake_quant.calls import CompiledKernels, HostKernels
from torch_frontend.fake_quant.device import CudaKernels, Driver


class SlowFakeQuantWarning(UserWarning):
    """There is no compiled kernel; composed torch operators run, with the same results."""

    code = "W119"


class ReferenceKernels:
    """Composed torch operators. reason: why there are no compiled kernels."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.forward = reference.compute_forward
        self.backward = reference.compute_backward


Kernels = CompiledKernels | ReferenceKernels


def choose_kernels(x: Tensor) -> Kernels:
    """The implementation for x's device."""
    if x.device.type != "cuda":
        return _find_host_kernels()
    return _find_cuda_kernels(
        torch.cuda.current_device() if x.device.index is None else x.device.index
    )


def available() -> dict[str, str]:
    """Implementation of fake_quantize on "cpu" and on the current "cuda" device: "compiled" or "reference: <reason>".

    Builds and loads the kernels unless they are there.
    """
    gpu = (
        _describe(_find_cuda_kernels(torch.cuda.current_device()))
        if torch.cuda.is_available()
        else "reference: no GPU"
    )
    return {"cpu": _describe(_find_host_kernels()), "cuda": gpu}


def _describe(kernels: Kernels) -> str:
    return f"reference: {kernels.reason}" if isinstance(kernels, ReferenceKernels) else "compiled"


@cache  # failures too: a build that failed is not tried again for every tensor
def _find_host_kernels() -> Kernels:
    try:
        library = load_host()
    except OnnxqError as error:
        return _fall_back("the CPU", str(error))
    return HostKernels(library) if library is not None else _fall_back("the CPU", host_reason())


@cache
def _find_cuda_kernels(index: int) -> Kernels:
    try:
        kernels = _make_cuda_kernels()
        # One instance for all devices; each loads its own module.
        kernels.load_kernels(torch.device("cuda", index))
    except (OnnxqError, OSError, DriverError) as error:
        return _fall_back("CUDA", str(error))
    return kernels


@cache
def _make_cuda_kernels() -> CudaKernels:
    # NVRTC of the CUDA packages that torch's wheel needs is found without help; older wheels carry it in torch/lib.
    own = Path(torch.__file__).parent / "lib"
    return CudaKernels(Driver(), lambda arch: device_image(arch, (own,)).data)


def _fall_back(device: str, reason: str) -> Kernels:
    text = f"fake_quantize on {device} runs as composed torch operators: the same numbers, many times slower. {reason}"
    _warn_once(f"{text} [{SlowFakeQuantWarning.code}]")
    return ReferenceKernels(reason)


@cache  # one warning per message and process, whatever the user's warning filter says
def _warn_once(message: str) -> None:
    warnings.warn(message, SlowFakeQuantWarning, stacklevel=2)
