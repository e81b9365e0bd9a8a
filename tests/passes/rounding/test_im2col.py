"""Rows times weights are the convolution, of random geometries."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.passes.rounding.operators import (
    Geometry,
    compute_gather_indices,
    gather_positions,
    sample_positions,
    window_means,
)
from onnxq.passes.rounding.second_moments import position_limit
from onnxq.runtime import Session
from tests.passes.rounding.kit import one_node


@st.composite
def geometries(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """(attributes of a Conv, shape of its input, shape of its weight)."""
    rank = draw(st.integers(1, 2))
    several = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel, strides = draw(several), draw(several)
    dilations = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    groups, inside, rows = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": groups}
    auto = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto == "NOTSET":
        attrs["pads"] = draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
    elif auto == "VALID":
        attrs["auto_pad"] = auto
    else:
        # ONNX Runtime refuses dilations with SAME.
        attrs["auto_pad"], attrs["dilations"] = auto, [1] * rank
    spatial = tuple(draw(st.lists(st.integers(6, 9), min_size=rank, max_size=rank)))
    shape = (draw(st.integers(1, 2)), groups * inside, *spatial)
    return attrs, shape, (groups * rows, inside, *kernel)


def geometry_of(attrs: dict[str, Any]) -> Geometry:
    rank = len(attrs["kernel_shape"])
    return Geometry(
        groups=attrs["group"],
        kernel=tuple(attrs["kernel_shape"]),
        strides=tuple(attrs["strides"]),
        dilations=tuple(attrs["dilations"]),
        pads=tuple(attrs.get("pads", (0,) * (2 * rank))),
        auto_pad=attrs.get("auto_pad", "NOTSET"),
    )


@given(geometries(), st.integers(0, 1000))
@settings(max_examples=60)
def test_rows_times_weights_are_the_convolution(case: Any, seed: int) -> None:
    attrs, shape, weight = case
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(weight).astype(np.float32)
    wanted = Session(one_node("Conv", w, shape, **attrs), optimize=False).run({"x": x})["y"]
    geometry = geometry_of(attrs)
    total = gather_positions(shape, geometry)
    assert total == wanted.shape[0] * int(np.prod(wanted.shape[2:]))
    rows = compute_gather_indices(shape, geometry, np.arange(total)).gather_columns(x).transpose(0, 2, 1)
    each = rows.reshape(len(rows), shape[0], -1, rows.shape[2]).mean(axis=2, dtype=np.float64)
    np.testing.assert_allclose(window_means(x, geometry), each.transpose(1, 0, 2), atol=1e-5)
    some = np.flatnonzero(rng.integers(0, 2, total))
    assert np.array_equal(
        compute_gather_indices(shape, geometry, some).gather_columns(x).transpose(0, 2, 1), rows[:, some]
    )
    groups = geometry.groups
    got = rows @ w.reshape(groups, weight[0] // groups, -1).transpose(0, 2, 1)
    got = got.transpose(1, 0, 2).reshape(wanted.shape[0], *wanted.shape[2:], weight[0])
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), wanted, rtol=1e-4, atol=1e-4)


def test_positions_are_chosen_alike_each_time_and_never_twice() -> None:
    chosen = sample_positions(1000, 100, 3)
    assert np.array_equal(chosen, sample_positions(1000, 100, 3))
    assert len(set(chosen.tolist())) == 100
    assert not np.array_equal(chosen, sample_positions(1000, 100, 4))
    assert sample_positions(50, 100, 0).tolist() == list(range(50))
    assert position_limit(1, 2304) < position_limit(1, 64) * 8
    assert position_limit(1, 16) >= 100 * 16


@pytest.mark.parametrize("pad", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_splits_an_odd_pixel_as_asked(pad: str) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    geometry = Geometry(kernel=(2,), strides=(1,), dilations=(1,), auto_pad=pad)
    rows = compute_gather_indices(x.shape, geometry, np.arange(4)).gather_columns(x)[0].T
    wanted = {"SAME_UPPER": [[0, 1], [1, 2], [2, 3], [3, 0]], "SAME_LOWER": [[0, 0], [0, 1], [1, 2], [2, 3]]}
    assert rows.tolist() == wanted[pad]
