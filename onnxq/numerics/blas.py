"""The number of threads of numpy's matrix products.

OpenBLAS lets its threads spin between products. With many small products they cost several times the processor time of
one thread, and take the cores from the inference engine that runs in between: on two busy cores the rounding of weights
took 15 s of processor time and 33 of wall instead of 3 and 7; `onnxq quantize` of MiniLM 22 s of wall instead of 13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from threadpoolctl import ThreadpoolController


@contextmanager
def use_one_blas_thread() -> Iterator[None]:
    """Compute matrix products in one thread inside; as before afterwards."""
    with _find_libraries()[0].limit(limits=1):
        yield


@contextmanager
def use_all_blas_threads() -> Iterator[None]:
    """Use as many threads as there were at first, for products large enough to gain by them."""
    controller, usual = _find_libraries()
    with controller.limit(limits=usual):
        yield


# Once: looking through all loaded libraries takes milliseconds.
@lru_cache(maxsize=1)
def _find_libraries() -> tuple[ThreadpoolController, int]:
    """Find the loaded BLAS libraries and their number of threads."""
    controller = ThreadpoolController().select(user_api="blas")
    return controller, max((library["num_threads"] for library in controller.info()), default=1)
