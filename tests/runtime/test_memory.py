"""Freed memory goes back to the system; where the C library has no such call, nothing happens."""

import ctypes
import sys
from collections.abc import Iterator

import pytest

from onnxq.numerics import machine
from onnxq.runtime import trim_memory


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """The call is looked up once for each process."""
    machine._find_trim.cache_clear()
    yield
    machine._find_trim.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is of glibc")
def test_the_c_library_is_asked_with_nothing_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        malloc_trim = staticmethod(asked.append)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    trim_memory()
    trim_memory()
    assert asked == [0, 0]


@pytest.mark.parametrize("fault", [OSError, AttributeError])
def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch, fault: type[Exception]) -> None:
    def without(_: object) -> object:
        raise fault

    monkeypatch.setattr(ctypes, "CDLL", without)
    trim_memory()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    trim_memory()
