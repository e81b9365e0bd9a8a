"""A few of the moments that `python -m tests.fuzz.kills` tries."""

import os
from pathlib import Path

import pytest

from tests.fuzz.kills import stop_often


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_stopped_at_any_moment_nothing_half_written_is_left(tmp_path: Path) -> None:
    endings, wrong = stop_often(5, 1, tmp_path)
    assert wrong == []
    assert sum(endings.values()) == 5
