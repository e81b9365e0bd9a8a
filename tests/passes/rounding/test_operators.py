"""Every operator's matrix form against the operator itself, and the sweep over each at every width and granularity."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import onnxq
from onnxq.config import Config, TensorConfig
from onnxq.graph import GraphIndex, get_index, name_nodes
from onnxq.passes.assembly import build_quantized
from onnxq.passes.rounding import operators as forms
from onnxq.passes.rounding import sequential as sweeping
from onnxq.passes.rounding.second_moments import position_limit
from onnxq.passes.rounding.sequential import RoundingOptions, round_sequentially
from onnxq.plan import SitePlan
from onnxq.progress import silent
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.passes.kit import parse
from tests.passes.rounding.kit import ALL, FOUR, calibrated, one_node
from tests.pipeline.models import list_accounts, quantize


def planned(proto: onnx.ModelProto, data: dict[str, np.ndarray], **raw: Any) -> onnxq.Result:
    skip = ("cross_layer_equalization", "bias_absorption", "smoothquant", "ranges", "promotion")
    return quantize(proto, data, Config(target="virtual", rules=ALL, skip=skip, **raw))


def operators(proto: onnx.ModelProto, data: dict[str, np.ndarray], **raw: Any) -> list[forms.Operator]:
    return forms.list_operators(GraphIndex(name_nodes(proto)), planned(proto, data, **raw).plan)


@st.composite
def transposed(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    rank = draw(st.integers(1, 2))
    several = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel, strides, groups = draw(several), draw(several), draw(st.integers(1, 3))
    dilations = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": groups}
    if draw(st.booleans()):
        attrs["pads"] = draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
        # ONNX allows as much as the dilation, too; ONNX Runtime refuses to run it.
        attrs["output_padding"] = [draw(st.integers(0, step - 1)) for step in strides]
    spatial = tuple(draw(st.lists(st.integers(5, 7), min_size=rank, max_size=rank)))
    inside, outside = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return attrs, (draw(st.integers(1, 2)), groups * inside, *spatial), (groups * inside, outside, *kernel)


@given(transposed(), st.integers(0, 99))
@settings(max_examples=40)
def test_rows_times_weights_are_the_transposed_convolution(case: Any, seed: int) -> None:
    attrs, shape, weight = case
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(weight).astype(np.float32)
    proto = one_node("ConvTranspose", w, shape, **attrs)
    wanted = Session(proto, optimize=False).run({"x": x})["y"]
    (one,) = operators(proto, {"x": x})
    total = forms.gather_positions(shape, one.geometry)
    assert total == wanted.shape[0] * int(np.prod(wanted.shape[2:]))
    rows = forms.gather_columns([x], one.geometry, np.arange(total))[0].transpose(0, 2, 1)
    np.testing.assert_allclose(forms.window_means(x, one.geometry).mean(axis=0), rows.mean(axis=1), atol=1e-5)
    got = rows @ one.to_rows(w).transpose(0, 2, 1)
    got = got.transpose(1, 0, 2).reshape(wanted.shape[0], *wanted.shape[2:], -1)
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), wanted, rtol=1e-4, atol=1e-4)
    assert np.array_equal(one.to_stored(one.to_rows(w)), w)


def test_padding_that_hangs_on_the_size_is_left_alone() -> None:
    w = np.ones((2, 2, 3), np.float32)
    data = {"x": np.random.default_rng(0).standard_normal((4, 2, 5)).astype(np.float32)}
    for attrs in ({"auto_pad": "SAME_UPPER", "strides": [2]}, {"output_shape": [9], "strides": [2]}):
        assert not operators(one_node("ConvTranspose", w, (4, 2, 5), **attrs), data, effort="balanced")


CASES = {
    "Conv": ((12, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    "grouped Conv": ((12, 4, 3, 3), {"group": 2}),
    "depthwise Conv": ((8, 1, 3, 3), {"group": 8}),
    "ConvTranspose": ((8, 6, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "grouped ConvTranspose": ((8, 3, 3, 3), {"group": 2, "strides": [2, 2]}),
    "Gemm": ((10, 32), {"transB": 1}),
    "turned Gemm": ((32, 10), {}),
    "MatMul": ((32, 10), {}),
}


def smooth(count: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Inputs whose neighbours and channels are alike, as those of trained networks are."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(1).standard_normal((shape[0], shape[0])) * 0.5 + 0.7
    values = rng.standard_normal((count, *shape))
    for axis in range(2, values.ndim):
        values = values + np.roll(values, 1, axis) + np.roll(values, 2, axis)
    return np.moveaxis(np.moveaxis(values, 1, -1) @ mixing + 0.5, -1, 1).astype(np.float32)


# 16 bits of activation: what is left is the weight's error.
WIDE = TensorConfig(bits=16, scheme="asymmetric")


def weight(result: onnxq.Result) -> SitePlan:
    return next(site for site in result.plan.sites if site.role is Role.WEIGHT)


# Every operator at the ends and in the middle, one operator at every width.
@pytest.mark.parametrize(
    ("name", "grain", "bits"),
    [
        (name, grain, bits)
        for name in CASES
        for grain in ("channel", "block")
        if (name, grain) != ("depthwise Conv", "block")
        for bits in ((2, 3, 4, 5, 6, 7, 8) if name == "Gemm" else (2, 4, 8))
    ],
)
def test_swept_weights_answer_better_on_new_data(name: str, grain: str, bits: int) -> None:
    shape, attrs = CASES[name]
    w = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    data = smooth(160, (8, 6, 6) if "Conv" in name else (32,), 5)
    # Smaller, so that none lies outside the range of what was seen: clipping is not the weights' error.
    fresh = smooth(32, data.shape[1:], 6) * np.float32(0.6)
    proto = one_node(name.split()[-1], w, (None, *data.shape[1:]), **attrs)
    wish = TensorConfig(bits=bits, granularity=grain, block_size=4 if grain == "block" else None)  # type: ignore[arg-type]
    errors = []
    for effort in ("fast", "balanced"):
        result = planned(proto, {"x": data}, weights=wish, activations=WIDE, effort=effort)
        assert (weight(result).values is not None) == (effort == "balanced")
        gap = Session(result.model, optimize=False).run({"x": fresh})["y"] - Session(proto).run({"x": fresh})["y"]
        errors.append(float((gap.astype(np.float64) ** 2).sum()))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize(("bits", "count", "treated"), [(8, 64, False), (8, 160, True), (4, 64, True)])
def test_eight_bits_are_left_alone_where_few_positions_were_seen(bits: int, count: int, treated: bool) -> None:
    w = np.random.default_rng(3).standard_normal((32, 16)).astype(np.float32)
    proto = one_node("MatMul", w, (None, 32))
    wish = TensorConfig(bits=bits, granularity="channel")
    result = planned(proto, {"x": smooth(count, (32,), 5)}, weights=wish, activations=WIDE, effort="balanced")
    assert (weight(result).values is not None) == treated
    assert ("fewer than 100 positions" in list_accounts(result, "rounding")[0]) != treated


# ---- Rows times weights are the convolution, of random geometries.


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


@given(geometries(), st.integers(0, 1000))
@settings(max_examples=60)
def test_rows_times_weights_are_the_convolution(case: Any, seed: int) -> None:
    attrs, shape, weight = case
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(weight).astype(np.float32)
    wanted = Session(one_node("Conv", w, shape, **attrs), optimize=False).run({"x": x})["y"]
    geometry = forms.Geometry(
        groups=attrs["group"], kernel=tuple(attrs["kernel_shape"]), strides=tuple(attrs["strides"]),
        dilations=tuple(attrs["dilations"]), pads=tuple(attrs.get("pads", (0,) * (2 * len(shape) - 4))),
        auto_pad=attrs.get("auto_pad", "NOTSET"),
    )  # fmt: skip
    total = forms.gather_positions(shape, geometry)
    assert total == wanted.shape[0] * int(np.prod(wanted.shape[2:]))
    rows = forms.gather_columns([x], geometry, np.arange(total))[0].transpose(0, 2, 1)
    each = rows.reshape(len(rows), shape[0], -1, rows.shape[2]).mean(axis=2, dtype=np.float64)
    np.testing.assert_allclose(forms.window_means(x, geometry), each.transpose(1, 0, 2), atol=1e-5)
    some = np.flatnonzero(rng.integers(0, 2, total))
    assert np.array_equal(forms.gather_columns([x], geometry, some)[0].transpose(0, 2, 1), rows[:, some])
    groups = geometry.groups
    got = rows @ w.reshape(groups, weight[0] // groups, -1).transpose(0, 2, 1)
    got = got.transpose(1, 0, 2).reshape(wanted.shape[0], *wanted.shape[2:], weight[0])
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), wanted, rtol=1e-4, atol=1e-4)


def test_positions_are_chosen_alike_each_time_and_never_twice() -> None:
    chosen = forms.sample_positions(1000, 100, 3)
    assert np.array_equal(chosen, forms.sample_positions(1000, 100, 3))
    assert len(set(chosen.tolist())) == 100
    assert not np.array_equal(chosen, forms.sample_positions(1000, 100, 4))
    assert forms.sample_positions(50, 100, 0).tolist() == list(range(50))
    assert position_limit(1, 2304) < position_limit(1, 64) * 8
    assert position_limit(1, 16) >= 100 * 16


@pytest.mark.parametrize("pad", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_splits_an_odd_pixel_as_asked(pad: str) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    geometry = forms.Geometry(kernel=(2,), strides=(1,), dilations=(1,), auto_pad=pad)
    rows = forms.gather_columns([x], geometry, np.arange(4))[0][0].T
    wanted = {"SAME_UPPER": [[0, 1], [1, 2], [2, 3], [3, 0]], "SAME_LOWER": [[0, 0], [0, 1], [1, 2], [2, 3]]}
    assert rows.tolist() == wanted[pad]


Array = NDArray[Any]
# At the default effort, and without the pass of biases either.
POOLED = FOUR.model_copy(update={"effort": None, "skip": (*FOUR.skip, "bias_absorption")})
HEAD = "y = Gemm <transB=1>(f, v, b)"


def network(head: str) -> onnx.ModelProto:
    pixels = "y = Conv" in head
    rng = np.random.default_rng(1)
    shapes = {"w": (48, 3, 4, 4), "v": (10, 48, 1, 1) if pixels else (10, 48), "b": (10,)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    text = f"g (float[N,3,20,20] x) => (float[N,10{',H,W' if pixels else ''}] y) {{ c = Conv <strides=[2,2]>(x, w) "
    text += f"r = Relu(c) {head} }}"
    return parse(text, opset=18, **weights, flat=np.array([-1, 48]), spatial=np.array([2, 3]))


def pictures(count: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((count, 3, 5, 5)).astype(np.float32)
    fine = rng.standard_normal((count, 3, 20, 20)).astype(np.float32)
    return {"x": coarse.repeat(4, 2).repeat(4, 3) + 0.3 * fine}


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (f"p = GlobalAveragePool(r) f = Flatten(p) {HEAD}", True),
        (f"p = GlobalAveragePool(r) f = Reshape(p, flat) {HEAD}", True),
        (f"f = ReduceMean <keepdims=0>(r, spatial) {HEAD}", True),
        ("p = GlobalAveragePool(r) y = Conv(p, v, b)", True),
        (f"p = GlobalMaxPool(r) f = Flatten(p) {HEAD}", False),
        ("p = AveragePool <kernel_shape=[2,2]>(r) y = Conv(p, v, b)", False),
        ("y = Conv(r, v, b)", False),
    ],
)
def test_what_is_behind_a_pooling(head: str, found: bool) -> None:
    prepared, plan, _ = calibrated(network(head), pictures(12), POOLED)
    index = get_index(prepared.model)
    pool = forms.find_pooling(index, forms.list_operators(index, plan)[-1])
    assert (pool is not None) == found
    assert pool is None or pool[0].op_type in ("GlobalAveragePool", "ReduceMean")


def test_fewer_answers_are_lost_on_new_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = network(f"p = GlobalAveragePool(r) f = Flatten(p) {HEAD}")
    prepared, plan, samples = calibrated(proto, pictures(12), POOLED)
    fresh = pictures(200, seed=5)
    wanted = Session(proto, optimize=False).run(fresh)["y"]

    def lost() -> float:
        head = frozenset(one.node.name for one in forms.list_operators(get_index(prepared.model), plan)[-1:])
        swept = round_sequentially(
            prepared.model, plan, samples, options=RoundingOptions(head, alone=True), progress=silent
        )
        assert len(swept.done) == 1
        got = Session(build_quantized(prepared, swept.plan), optimize=False).run(fresh)["y"]
        return float(((got - wanted).std(axis=0) ** 2).sum())

    before_the_pool = lost()
    monkeypatch.setattr(sweeping, "find_pooling", lambda index, one: None)
    assert before_the_pool < 0.9 * lost()
