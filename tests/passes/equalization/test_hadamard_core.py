"""Hadamard matrices by Sylvester, Paley and blocks: orthogonal, flat, the mean left alone, a seed for bytes."""

import hashlib

import numpy as np
import pytest

from onnxq.passes.equalization.rotation import Hadamard, find_base, make_paley, multiply_row, split_size


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 60, 84])
def test_paley_gives_orthogonal_signs(order: int) -> None:
    found = make_paley(order)
    assert found is not None
    assert set(np.unique(found)) <= {-1, 1}
    assert np.array_equal(found.astype(int) @ found.T.astype(int), order * np.eye(order))


def test_sizes_are_doubled_from_a_small_matrix_or_cut_into_blocks() -> None:
    assert make_paley(92) is None
    assert [find_base(size) for size in (1, 64, 80, 96, 768, 896, 2304, 30)] == [1, 1, 20, 12, 12, 28, 36, 0]
    assert [split_size(size) for size in (768, 30, 27, 100)] == [(768,), (28, 2), (24, 2, 1), (96, 4)]


@pytest.mark.parametrize("level", [False, True])
@pytest.mark.parametrize("size", [1, 2, 27, 64, 80, 96])
def test_a_rotation_is_orthogonal_and_spreads_single_channels(size: int, level: bool) -> None:
    q = Hadamard(3, size, level).turn_channels(np.eye(size), -1)
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-12)
    if level:
        np.testing.assert_allclose(q.sum(axis=1), 1, atol=1e-12)
    if len(split_size(size)) == 1:
        assert np.abs(q).max() * np.sqrt(size) < (4 if level else 1.000001)


def test_both_sides_of_a_product_turn_alike_and_parts_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 48)), rng.standard_normal((48, 7))
    for matrix in (Hadamard(1, 48), Hadamard(1, 24, level=True), Hadamard(7, 16)):
        np.testing.assert_allclose(matrix.turn_channels(x, -1) @ matrix.turn_channels(w, 0), x @ w, atol=1e-12)
    scale = rng.uniform(0.5, 2, 48)
    np.testing.assert_allclose(
        Hadamard(1, 48).turn_channels(x, 1) @ Hadamard(1, 48).turn_channels(w, 0, scale), x * scale @ w, atol=1e-12
    )
    parts = Hadamard(7, 16).turn_channels(x, -1)
    np.testing.assert_array_equal(parts[:, 16:32], Hadamard(7, 16).turn_channels(x[:, 16:32], -1))


def test_a_seed_stands_for_bytes_of_the_arrays_own_type() -> None:
    w = np.linspace(-1, 1, 80 * 70, dtype=np.float32).reshape(80, 70)
    turned = Hadamard(5, 80, level=True).turn_channels(w, 0)
    assert turned.dtype == np.float32
    assert hashlib.sha256(turned.tobytes()).hexdigest()[:16] == "12d5803da4c3845a"
    assert not np.array_equal(turned, Hadamard(6, 80, level=True).turn_channels(w, 0))


def test_a_row_times_a_matrix() -> None:
    rng = np.random.default_rng(0)
    row, matrix = rng.standard_normal(9), rng.standard_normal((9, 4))
    np.testing.assert_allclose(multiply_row(row, matrix), row @ matrix, atol=1e-12)
