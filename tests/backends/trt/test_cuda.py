"""The driver's calls: in words without a GPU, real work with one."""

import ctypes

import numpy as np
import pytest

from onnxq.backends.trt import cuda
from onnxq.backends.trt.cuda import Cuda, CudaError, count_gpus


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")
def test_without_a_gpu_the_driver_is_what_is_missing() -> None:
    with pytest.raises(CudaError, match=r"driver|cuInit|cuDevice"):
        Cuda()


@pytest.mark.gpu
def test_events_measure_captured_work() -> None:
    cuda = Cuda()
    assert cuda.name
    source, target = cuda.upload(np.ones(2**20, np.float32)), cuda.allocate(2**22)
    launched = []

    def work() -> None:
        launched.append(1)
        given = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(2**22)
        cuda._call("cuMemcpyDtoDAsync_v2", *given, cuda.stream)

    launch = cuda.capture(work)
    first, second = cuda.make_events(2)
    cuda.record(first)
    launch()
    cuda.record(second)
    cuda.synchronize()
    assert 0 < cuda.measure(first, second) < 1
    assert len(launched) == 1


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no such library")

    monkeypatch.setattr(cuda, "load_driver", fail)
    assert cuda.count_gpus() == 0


@pytest.mark.gpu
def test_this_machines_are_counted() -> None:
    assert cuda.count_gpus() > 0
