"""How many threads numpy's matrix products use, for a while.

OpenBLAS lets its threads spin between products. Many small ones then cost several times the processor time of one
thread, and take the cores from the inference engine that runs in between: on two busy cores a sweep took 15 s of
processor time and 33 of wall in place of 3 and 7; `onnxq quantize` of MiniLM 22 s of wall in place of 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np

_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Matrix products in one thread inside; as before afterwards. Where numpy has no OpenBLAS of its own, no change."""
    with _threads(lambda _: 1):
        yield


@contextmanager
def all_blas_threads() -> Iterator[None]:
    """As many as there were before anybody asked for one, for products large enough to gain by them."""
    with _threads(lambda usual: usual):
        yield


@contextmanager
def _threads(wanted: Callable[[int], int]) -> Iterator[None]:
    found = _controls()
    if found is None:
        yield
        return
    get, change, usual = found
    before = get()
    change(wanted(usual))
    try:
        yield
    finally:
        change(before)


@lru_cache(maxsize=1)
def _controls() -> tuple[Callable[[], int], Callable[[int], None], int] | None:
    """(get, set, threads now) of the OpenBLAS that numpy's wheel brings along."""
    home = Path(np.__file__).parent
    for folder in (home.parent / "numpy.libs", home / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            for name in _NAMES:
                get, change = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
                if get is not None and change is not None:
                    return get, change, int(get())
    return None
