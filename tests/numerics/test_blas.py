"""Threads of matrix products: one inside, as before afterwards, errors or not."""

import sys

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from onnxq.numerics.machine import _find_libraries, use_all_blas_threads, use_one_blas_thread


def threads() -> set[int]:
    """The numbers of threads, as the libraries themselves tell them."""
    return {library["num_threads"] for library in ThreadpoolController().select(user_api="blas").info()}


def test_threads_are_one_inside_and_as_before_afterwards() -> None:
    controller, usual = _find_libraries()
    if not threads():
        pytest.skip("this numpy has no library whose threads can be set")
    with controller.limit(limits=2):
        before = threads()
        with use_one_blas_thread():
            with use_one_blas_thread():
                assert threads() == {1}
            assert threads() == {1}
            with use_all_blas_threads():
                assert threads() == {usual}
            assert threads() == {1}
        assert threads() == before
        with pytest.raises(ZeroDivisionError), use_one_blas_thread():
            raise ZeroDivisionError
        assert threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may bring another library")
def test_the_wheel_of_numpy_is_understood() -> None:
    config = np.show_config(mode="dicts")
    if config["Build Dependencies"]["blas"]["name"] == "scipy-openblas":
        assert threads()
    with use_one_blas_thread():
        assert np.ones(3) @ np.ones(3) == 3
