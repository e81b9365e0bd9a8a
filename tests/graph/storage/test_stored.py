"""Arrays in files: the same numbers, and no memory once their pages are let go of."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxq.graph.storage import Spool, release_pages


def count_resident() -> int:
    """Kilobytes of mapped files in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is told by /proc")
def test_released_pages_take_no_memory_and_come_back() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32).reshape(-1, 64)
    array = Spool().write(values).map()
    empty = count_resident()
    assert np.array_equal(array, values)
    assert count_resident() - empty > 15 << 10
    # A view of it, as parts of it are looked at.
    release_pages(array[5:].T)
    assert count_resident() - empty < 1 << 10
    assert np.array_equal(array, values)


def test_memory_of_ones_own_stays() -> None:
    values = np.arange(8.0)
    release_pages(values, values[2:], np.float32(1) * np.ones(()))
    assert values.tolist() == list(range(8))
    assert not isinstance(values.base, mmap.mmap)
