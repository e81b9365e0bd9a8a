"""Shifts: what a constant adds to an operator's outputs, and ranges that never widen."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser

from onnxq.passes.equalization.bias_absorption import absorb_shifts, compute_shifts
from onnxq.runtime import Session

F = np.float32


@given(
    groups=st.sampled_from([1, 2, 3]), out=st.integers(1, 3), inner=st.integers(1, 3), kernel=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_what_a_constant_adds_to_a_convolution(groups: int, out: int, inner: int, kernel: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((groups * out, inner, kernel, kernel)).astype(F)
    c = rng.standard_normal(groups * inner)
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[1,{groups * inner},{kernel},{kernel}] x) '
        f"=> (float[1,{groups * out},1,1] y) {{ y = Conv<group={groups}>(x, w) }}"
    )
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    x = np.broadcast_to(c.astype(F)[None, :, None, None], (1, groups * inner, kernel, kernel))
    got = Session(proto, optimize=False).run({"x": np.ascontiguousarray(x)})["y"].reshape(-1)
    assert np.allclose(absorb_shifts(weight, c, 0, groups), got, atol=1e-4)


def test_what_a_constant_adds_to_a_matrix() -> None:
    rng = np.random.default_rng(0)
    weight, c = rng.standard_normal((4, 3)), rng.standard_normal(4)
    assert np.allclose(absorb_shifts(weight, c, 1, 1), c @ weight)
    assert np.allclose(absorb_shifts(weight.T, c, 0, 1), c @ weight)


@settings(max_examples=50)
@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.tuples(st.floats(-9, 9), st.floats(0, 9)), min_size=n)))
def test_shifts_never_widen_the_range(pairs: list[tuple[float, float]]) -> None:
    low = np.array([a for a, _ in pairs])
    high = low + np.array([b for _, b in pairs])
    for rectified in (False, True):
        l0, h0 = (np.maximum(low, 0), np.maximum(high, 0)) if rectified else (low, high)
        c = compute_shifts(l0, h0, rectified=rectified)
        before, after = max(h0.max(), 0) - min(l0.min(), 0), max((h0 - c).max(), 0) - min((l0 - c).min(), 0)
        assert after <= before + 1e-5
        if rectified:
            assert (c >= 0).all()
            assert (c <= l0 + 1e-6).all()
