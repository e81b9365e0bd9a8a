"""The benchmark of the fake-quant operator: its limits and its kernels alone run beside the operator."""

import importlib
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_row_is_timed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("fake_quant")
    tensors = script._made(script.SMALL[-1], script.torch.float32, device)
    ours = {script._OURS[True]: script.Contender(script._ours, True)}
    least = script._measure(tensors, ours, 1, script._Clock(device))
    assert len(least) == 5  # two limits, the kernels with and without sums, the operator
    assert all(0 < ms < math.inf for pair in least.values() for ms in pair)
