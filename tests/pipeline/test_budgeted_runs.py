"""A run keeps to its budget, and with enough of it is the run without one."""

from __future__ import annotations

import time

import pytest

import onnxq
from tests.pipeline.models import EVERYTHING, images, residual

BALANCED = EVERYTHING.model_copy(update={"effort": "balanced"})


@pytest.fixture(scope="module")
def unhurried() -> float:
    begun = time.monotonic()
    onnxq.quantize(residual(), images(64), BALANCED)
    return time.monotonic() - begun


@pytest.mark.parametrize("share", [0.02, 0.4, 0.7])
def test_a_run_keeps_to_it(unhurried: float, share: float) -> None:
    # The smallest is less than reading the model takes, on any machine.
    allowed = unhurried * share if share > 0.1 else 0.005
    begun = time.monotonic()
    done = onnxq.quantize(residual(), images(64), BALANCED, overrides={"budget": allowed})
    spent = time.monotonic() - begun
    told = [line for line in done.report.accounts if line.startswith("budget: ")]
    assert told
    assert min(done.report.checks[0].sqnr_db) > 25
    # One step more than planned, on a machine that others use too; the least of it takes what it takes.
    assert spent < max(1.5 * allowed + 0.5, 0.8 * unhurried)
    if share < 0.1:
        assert any("too small" in line for line in told)
        assert done.report.checked == 1
        assert done.report.latency is None


def test_enough_of_it_changes_nothing(unhurried: float) -> None:
    free = onnxq.quantize(residual(), images(32), BALANCED, overrides={"latency": False})
    done = onnxq.quantize(
        residual(), images(32), BALANCED, overrides={"latency": False, "budget": 100 * unhurried + 100}
    )
    assert done.model.SerializeToString() == free.model.SerializeToString()
    assert not [line for line in done.report.accounts if line.startswith("budget: ")]
