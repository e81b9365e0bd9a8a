"""The libraries that build engines: their versions without importing them."""

import re

import pytest

from onnxq.backends import engine, find_engine, list_engines


def test_every_engine_has_a_library_with_an_install_line() -> None:
    for one in list_engines().values():
        assert re.fullmatch(r"pip install 'onnxq\[[\w-]+\]'|npm install [\w-]+@[\d.]+ --ignore-scripts", one.install)
        # Packages of npm are described by their own folder.
        assert one.packages or one.install.startswith("npm")


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.fullmatch(r"ONNX Runtime \d+\.\d+\.\d+\S*", find_engine("ort").describe_version())


def test_of_several_packages_the_first_that_is_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"tensorrt-cu12": "10.9", "tensorrt-cu13": "10.13"}

    def version(name: str) -> str:
        if name not in held:
            raise engine.PackageNotFoundError(name)
        return held[name]

    monkeypatch.setattr(engine, "version", version)
    assert find_engine("tensorrt").describe_version() == "TensorRT 10.13"
    held.clear()
    assert find_engine("tensorrt").describe_version() == "TensorRT"


def test_a_missing_package_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = find_engine("openvino")
    monkeypatch.setattr(type(engine), "module", "openvino_that_is_not_there")
    obstacle = engine.find_obstacle()
    assert obstacle is not None
    assert obstacle.fix == "pip install 'onnxq[openvino]'"
