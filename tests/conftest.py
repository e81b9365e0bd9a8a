"""What every test runs under: one BLAS thread per worker, repeatable hypothesis, engines skipped where they are not.

Properties, by `--hypothesis-profile NAME` or HYPOTHESIS_PROFILE=NAME:
    onnxq   the default: the same examples in every run, and the first that fails is told as it is
    shrink  the same, and a failing example is made smaller first, which may take minutes where examples run engines
    search  new examples in every run, a thousand where a test does not say how many; `--hypothesis-seed N` repeats one
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # read once, when numpy is first imported
    os.environ.setdefault(_name, "1")

import gc
import importlib.util
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.networks import RECENT_ORT
from tests.processes import build_here

# Shrinking runs an example up to 500 times and for five minutes, and no setting bounds that; without it the search also
# ends at the first failure. No deadline: how long an example takes depends on who else is at work.
_QUICK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target)
settings.register_profile(
    "onnxq",
    deadline=None,
    derandomize=True,
    phases=_QUICK,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
_DEFAULT = settings.get_profile("onnxq")
settings.register_profile("shrink", parent=_DEFAULT, phases=tuple(Phase))
settings.register_profile("search", parent=_DEFAULT, derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "onnxq"))


@pytest.fixture(autouse=True, scope="session")
def quicken_commands() -> Iterator[None]:
    """Commands run in this process stay silent however slow the machine is, where a test does not ask for progress.

    Latencies are measured in three rounds, not until they are stable, which small models never are. Files need not
    survive a crash of the system: to wait for the disk takes longer than some tests.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        monkeypatch.setattr("onnxq.report.live.PATIENCE", 3600.0)
        monkeypatch.setattr("onnxq.runtime.timing._MOST_ROUNDS", 3)
        yield


@pytest.fixture
def engines_here() -> Iterator[None]:
    """ONNX Runtime and OpenVINO build in this process. Those of test_building.py and test_engine.py have their own."""
    with build_here():
        yield


def _missing(marker: str) -> str | None:
    if marker == "gpu":
        return None if shutil.which("nvidia-smi") else "no NVIDIA GPU"
    if marker == "recent_ort":
        return None if RECENT_ORT else "onnxruntime is older than 1.31"
    engines = ("tensorrt", "tensorrt_rtx")
    return None if any(importlib.util.find_spec(name) for name in engines) else "no TensorRT"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests are no garbage, and looking for it among them takes a quarter of the collection."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        # A full collection looks through all that torch and its compilers import later, for half a second.
        gc.set_threshold(3000, 20, 1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an engine that is not here, saying which."""
    for marker in ("gpu", "recent_ort", "trt"):
        reason = _missing(marker)
        for item in items:
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
