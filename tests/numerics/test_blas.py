"""Threads of matrix products: one inside, as before afterwards, errors or not."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from onnxq.numerics import blas
from onnxq.numerics.blas import all_blas_threads, one_blas_thread


def test_threads_are_one_inside_and_as_before_afterwards() -> None:
    found = blas._controls()
    if found is None:
        pytest.skip("this numpy has no OpenBLAS of its own")
    get, change, usual = found
    at_first = get()
    change(2)
    try:
        with one_blas_thread():
            with one_blas_thread():
                assert get() == 1
            assert get() == 1
            with all_blas_threads():
                assert get() == usual
            assert get() == 1
        assert get() == 2
        with pytest.raises(ZeroDivisionError), one_blas_thread():
            raise ZeroDivisionError
        assert get() == 2
    finally:
        change(at_first)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may bring another library")
def test_the_wheel_of_numpy_is_understood() -> None:
    config = np.show_config(mode="dicts")
    name = config["Build Dependencies"]["blas"]["name"]
    assert (blas._controls() is not None) == (name == "scipy-openblas")


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_controls", lambda: None)
    with one_blas_thread():
        assert np.ones(3) @ np.ones(3) == 3
