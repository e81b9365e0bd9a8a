from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxq.errors import VerificationError
from onnxq.evaluation import distances as metrics

ALL: list[Callable[[Any, Any], float]] = [metrics.mse, metrics.max_abs, metrics.sqnr_db, metrics.cosine, metrics.kl]


def test_hand_computed_values() -> None:
    a, b = np.array([3.0, -4.0]), np.array([3.0, -3.0])
    assert metrics.mse(a, b) == 0.5
    assert metrics.max_abs(a, b) == 1.0
    assert metrics.sqnr_db(a, b) == pytest.approx(10 * np.log10(25))
    assert metrics.cosine(a, b) == pytest.approx((9 + 12) / (5 * np.sqrt(18)))
    p, q = np.array([1.0, 3.0]), np.array([2.0, 2.0])
    assert metrics.kl(p, q) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))


def test_identical_zero_and_empty_arrays() -> None:
    x = np.arange(5.0)
    assert metrics.sqnr_db(x, x) == np.inf
    assert metrics.sqnr_db(x * 0, x * 0) == np.inf
    assert metrics.sqnr_db(x * 0, x) == -np.inf
    assert metrics.cosine(x, x) == pytest.approx(1.0)
    assert metrics.cosine(x * 0, x * 0) == 1.0
    assert metrics.cosine(x * 0, x) == 0.0
    assert metrics.cosine(x, -x) == pytest.approx(-1.0)
    empty = np.zeros((0, 3))
    assert [f(empty, empty) for f in ALL] == [0.0, 0.0, np.inf, 1.0, 0.0]


def test_float16_and_int8_do_not_overflow() -> None:
    a = np.full(1000, 60000, np.float16)
    assert metrics.mse(a, -a) == (2 * float(a[0])) ** 2
    assert metrics.max_abs(np.int8([127]), np.int8([-128])) == 255.0
    assert metrics.cosine(np.array([1e200, 0]), np.array([1e200, 0])) == 1.0
    assert metrics.cosine(np.array([1e-200, 0]), np.array([1e-200, 0])) == 1.0


def test_nan_and_inf_in_never_look_good() -> None:
    x = np.arange(1.0, 5.0)
    for bad in (np.nan, np.inf):
        y = x.copy()
        y[2] = bad
        for f in ALL:
            for value in (f(x, y), f(y, x), f(y, y)):
                assert np.isnan(value) or (f is metrics.sqnr_db and value == -np.inf) or (
                    f in (metrics.mse, metrics.max_abs, metrics.kl) and value == np.inf
                )  # fmt: skip


@pytest.mark.parametrize("f", ALL)
def test_shapes_must_agree(f: Callable[[Any, Any], float]) -> None:
    with pytest.raises(VerificationError, match=r"\(3,\) and \(3, 1\)"):
        f(np.ones(3), np.ones((3, 1)))


def test_kl_of_rows_logits_and_holes() -> None:
    logits, other = np.array([[0.0, 1.0], [2.0, 2.0]]), np.array([[1.0, 1.0], [2.0, 2.0]])
    share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = metrics.kl(share, np.full((2, 2), 0.5))
    assert wanted > 0
    assert metrics.kl(logits, other, logits=True) == pytest.approx(wanted)
    assert metrics.kl(logits.T, other.T, logits=True, axis=0) == pytest.approx(wanted)
    assert metrics.kl([0.0, 1.0], [0.5, 0.5]) == pytest.approx(np.log(2))
    assert metrics.kl([0.5, 0.5], [0.0, 1.0]) == np.inf
    assert metrics.kl([0.0, -2000.0], [0.0, -4000.0], logits=True) == 0.0
    with pytest.raises(VerificationError, match="logits=True"):
        metrics.kl([1.0, -1.0], [1.0, 1.0])
