"""The libraries that build engines: their versions without importing them."""

from __future__ import annotations

import re

import pytest

from onnxq.engines.builder import library
from onnxq.engines.builder.library import ENGINES, LIBRARIES, ORT, TRT, name_version


def test_every_engine_has_a_library_with_an_install_line() -> None:
    assert set(LIBRARIES) == set(ENGINES)
    for one in LIBRARIES.values():
        assert re.fullmatch(r"pip install 'onnxq\[[\w-]+\]'", one.install)
        assert one.packages


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.fullmatch(r"ONNX Runtime \d+\.\d+\.\d+\S*", name_version(ORT))


def test_of_several_packages_the_first_that_is_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"tensorrt-cu12": "10.9", "tensorrt-cu13": "10.13"}

    def version(name: str) -> str:
        if name not in held:
            raise library.PackageNotFoundError(name)
        return held[name]

    monkeypatch.setattr(library, "version", version)
    assert name_version(TRT) == "TensorRT 10.13"
    held.clear()
    assert name_version(TRT) == "TensorRT"
