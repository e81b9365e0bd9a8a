"""The package list: code found by folder, and two folders of data that travel in the wheel under other names.

`cuda` is never importable under that name: it would shadow NVIDIA's `cuda` namespace. Where there is a C++ compiler,
the wheel carries the CPU kernels of fake quantization, and is for one platform; else they are compiled on first use.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel, get_platform
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
DATA = {"onnxq_configs": "configs", "onnxq_cuda": "cuda"}
PATTERNS = ("*.yaml", "*.md", "*.h", "*.cuh", "*.cpp", "*.py")
# Kernels built ahead of time, each with its note.
PREBUILT = ("prebuilt/*.so*", "prebuilt/*.dylib*", "prebuilt/*.fatbin*", "prebuilt/*.cubin*")


class BuildKernels(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            self.build_kernels(Path(self.build_lib) / "onnxq_cuda" / "prebuilt")

    def build_kernels(self, place):
        sys.path.insert(0, str(HERE))
        try:
            from onnxq.kernels.host import build_host, portable_march

            place.mkdir(parents=True, exist_ok=True)
            build_host(place, march=portable_march())
        # A wheel without kernels is whole: they are compiled on first use then.
        except Exception as error:
            self.announce(f"no CPU kernels in the wheel: {error}", level=3)
        finally:
            sys.path.remove(str(HERE))
            for lock in place.glob(".*.lock"):
                lock.unlink()


class TagPlatform(bdist_wheel):
    def get_tag(self):
        library = any((Path(self.bdist_dir) / "onnxq_cuda" / "prebuilt").glob("libfq_cpu-*"))
        platform = get_platform(self.bdist_dir).replace("-", "_").replace(".", "_")
        return ("py3", "none", platform) if library else super().get_tag()


setup(
    packages=[*find_packages(str(HERE), include=["onnxq*", "torch_frontend*"]), *DATA],
    package_dir=DATA,
    package_data={
        "onnxq": ["py.typed", "**/*.json", "**/*.mjs", "**/*.j2"],
        "torch_frontend": ["qmodules/*.yaml"],
        **{name: [*PATTERNS, *PREBUILT] for name in DATA},
    },
    cmdclass={"build_py": BuildKernels, "bdist_wheel": TagPlatform},
)
