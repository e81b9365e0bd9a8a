"""The profiles of tests/conftest.py: a failing property ends at once, by default, and shrinks where it is asked to."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
LISTS = st.lists(st.integers(0, 10**6), max_size=50)


def _fail(profile: str) -> list[list[int]]:
    """Every example on which a property that does not hold was run; the last is the one told."""
    seen: list[list[int]] = []

    @settings(settings.get_profile(profile), max_examples=200, database=None)
    @given(LISTS)
    def property_of_lists(values: list[int]) -> None:
        seen.append(values)
        assert sum(values) <= 1000

    with pytest.raises(AssertionError):
        property_of_lists()
    return seen


@pytest.mark.parametrize("profile", ["onnxq", "search"])
def test_a_failing_property_ends_at_its_first_failure(profile: str) -> None:
    seen = _fail(profile)
    first = next(k for k, values in enumerate(seen) if sum(values) > 1000)
    assert all(values == seen[first] for values in seen[first:])
    assert len(seen) - first <= 3  # once more to see that it fails again, and once to tell it


def test_the_default_is_the_same_in_every_run() -> None:
    assert _fail("onnxq") == _fail("onnxq")


def test_a_failing_example_is_made_small_on_request() -> None:
    assert _fail("shrink")[-1] == [1001]


def test_pytest_takes_the_default_and_tells_how_to_repeat_a_failure(tmp_path: Path) -> None:
    """Examples as slow as those that run an engine; to shrink this one takes a hundred of them."""
    text = """
import time
from hypothesis import given, strategies as st

@given(st.lists(st.integers(0, 10**6), max_size=50))
def test_small(values):
    time.sleep(.3)
    assert sum(values) <= 1000
"""
    (tmp_path / "test_property.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HYPOTHESIS_", "PYTEST_"))}
    start = time.perf_counter()
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reproduce_failure" in done.stdout
    assert time.perf_counter() - start < 15
