"""GPUs as the driver counts them."""

from __future__ import annotations

import pytest

from onnxq.engines.builder import gpu


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no such library")

    monkeypatch.setattr(gpu, "load_driver", fail)
    assert gpu.count_gpus() == 0


@pytest.mark.gpu
def test_this_machines_are_counted() -> None:
    assert gpu.count_gpus() > 0
