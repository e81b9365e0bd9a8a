"""What provokes Q8xx: a package or compiler that is not there, in a process that cannot import it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from onnxq.kernels.device import arch_number, find_nvcc
from onnxq.kernels.host import build_host
from tests.codes.kit import reach, written

_ABSENT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from onnxq.errors import OnnxqError
try:
    {code}
except OnnxqError as error:
    print(error.code)
"""


class Said:
    """A code that another process printed."""

    def __init__(self, code: str) -> None:
        self.code = code


def without(package: str, code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _ABSENT.format(package=package, code=code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Said(done.stdout.strip())


@reach("Q801")
def no_onnxruntime(_: Path):
    return without("onnxruntime", "from onnxq.runtime.session import import_onnxruntime; import_onnxruntime()")


@reach("Q802")
def no_torch(_: Path):
    return without("torch", "import onnxq.qat; onnxq.qat.prepare_qat")


@reach("Q803")
def no_pillow(folder: Path):
    code = (
        "from onnxq.data.images import read_image; from onnxq.config.data import ImageConfig; "
        "from onnxq.graph import ValueInfo; from pathlib import Path; "
        "read_image(Path('a.png'), ImageConfig(size=(4, 4)), ValueInfo('x', 1, (1, 3, 4, 4)))"
    )
    return without("PIL", code)


@reach("Q810")
def no_tokenizers(folder: Path):
    file = written(folder, "{}", "tokenizer.json")
    return without("tokenizers", f"from onnxq.data.text import load_tokenizer; load_tokenizer({str(file)!r})")


@reach("Q804")
def no_polygraphy(_: Path):
    return without("polygraphy", "from onnxq.backends.trt.run import load_polygraphy; load_polygraphy('logger')")


@reach("Q805", pytest.mark.skipif(find_spec("tensorrt") is not None, reason="tensorrt is there"))
def no_tensorrt(folder: Path):
    import onnxq
    from tests.codes.kit import gemm

    onnxq.prove(gemm(), overrides={"engine": "tensorrt"})


@reach("Q806")
def no_compiler(_: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXQ_NVCC", "no-such-nvcc")
        find_nvcc()


@reach("Q807", pytest.mark.skipif(sys.platform == "win32", reason="a shell script"))
def failing_compiler(folder: Path):
    bad = written(folder, '#!/bin/sh\n[ "$1" = --version ] && echo bad && exit 0\nexit 1\n', "c++")
    bad.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(bad))
        build_host(folder)


@reach("Q808")
def unknown_gpu(folder: Path):
    from onnxq.kernels.device import build_cubin, find_nvrtc

    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC")
    build_cubin(found, arch_number("sm_10"), folder)
