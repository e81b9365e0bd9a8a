"""The package list: code found by folder, and two folders of data that travel in the wheel under other names.

`cuda` is never importable under that name: it would shadow NVIDIA's `cuda` namespace.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
DATA = {"onnxq_configs": "configs", "onnxq_cuda": "cuda"}
PATTERNS = ("*.yaml", "*.md", "*.h", "*.cuh", "*.cpp", "*.py")
# Kernels built ahead of time, each with its note.
PREBUILT = ("prebuilt/*.so*", "prebuilt/*.fatbin*", "prebuilt/*.cubin*")

setup(
    packages=[*find_packages(str(HERE), include=["onnxq*", "torch_frontend*"]), *DATA],
    package_dir=DATA,
    package_data={"onnxq": ["py.typed"], **{name: [*PATTERNS, *PREBUILT] for name in DATA}},
)
