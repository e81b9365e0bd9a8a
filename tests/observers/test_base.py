from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxq.backends import load_config
from onnxq.config import list_presets
from onnxq.errors import CalibrationError, ConfigError
from onnxq.observers import check_observers, create_observer, list_observers, register_observer
from onnxq.observers.base import _REGISTRY, flatten_values
from onnxq.observers.histogram import Histogram, HistogramView
from onnxq.spec import ObserverSpec, QuantSpec

QUANT = QuantSpec(signed=False, symmetric=False)
ALL = ("aciq", "entropy", "minmax", "moving_average", "mse", "percentile")


def test_the_table_is_complete() -> None:
    assert list_observers() == ALL
    assert [name for name in ALL if create_observer(ObserverSpec(name), QUANT).per_sample] == ["moving_average"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("percentil", {}, "did you mean 'percentile'"),
        ("percentile", {"percentil": 99.9}, "did you mean 'percentile'"),
        ("percentile", {"percentile": 101}, r"outside \(50, 100\]"),
        ("percentile", {"percentile": "99.9"}, "is not a float"),
        ("percentile", {"percentile": True}, "is not a float"),
        ("mse", {"bins": 100}, "outside 2048"),
        ("mse", {"bins": 4096.0}, "is not a int"),
        ("minmax", {"bins": 4096}, "has no option 'bins'"),
        ("aciq", {"distribution": "gauss"}, "did you mean 'gaussian'"),
    ],
)
def test_wrong_names_options_and_values_are_config_errors(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_observer(ObserverSpec(name, tuple(sorted(options.items()))), QUANT)


@pytest.mark.parametrize(
    ("text", "line", "path", "says"),
    [
        ("activations:\n  observer: {name: percentile, percentile: 0}", 2, "activations.observer", "outside (50, 100]"),
        ("mode: weight-only\nactivations: {observer: percentil}", 2, "activations.observer", "does not exist"),
        ("weights: {observer: entropy}", 1, "weights.observer", "is not one that weights have"),
        ("weights: {observer: {name: mse, bins: 4096}}", 1, "weights.observer", "takes no option 'bins'"),
        ("rules:\n  - op: Conv\n    set: {observer: {name: mse, bins: 1}}", 3, "rules[0].set.observer", "outside 2048"),
        ("rules: [{op: A, role: weight, set: {observer: aciq}}]", 1, "rules[0].set.observer", "that weights have"),
    ],
)
def test_a_configuration_is_told_of_them_by_line(tmp_path: Path, text: str, line: int, path: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_observers(load_config(file))
    assert caught.value.subject == f"{file}:{line}: {path}"
    assert says in caught.value.cause
    assert caught.value.code in ("Q310", "Q311")


@pytest.mark.parametrize(
    "observer", ["mse", "entropy", {"name": "mse", "bins": 4096}, {"name": "mse", "signed_scales": True}]
)
def test_a_rule_for_all_kinds_of_tensors_may_name_what_one_of_them_has(observer: str | dict[str, object]) -> None:
    # Negative scales are for blocks of weights alone.
    preset = "ort-int4-weights" if "signed_scales" in observer else "ort-int8"
    check_observers(load_config(preset, {"rules": [{"op": "Conv", "set": {"observer": observer}}]}))


@pytest.mark.parametrize("name", list_presets())
def test_presets_name_observers_that_are_there(name: str) -> None:
    check_observers(load_config(name))


@pytest.mark.parametrize("name", ["entropy", "aciq"])
def test_fp8_is_refused_where_levels_must_be_even(name: str) -> None:
    with pytest.raises(ConfigError, match="needs evenly spaced levels"):
        create_observer(ObserverSpec(name), QuantSpec(storage="float8e4m3fn"))


def test_options_reach_the_observer() -> None:
    values = np.arange(1001, dtype=np.float32)
    ends = []
    for percentile in (90, 99.0):
        observer = create_observer(ObserverSpec("percentile", (("bins", 2048), ("percentile", percentile))), QUANT)
        observer.update(values)
        ends.append([float(end) for end in observer.range()])
    assert ends[0] == pytest.approx([50, 950], abs=1.5)
    assert ends[1] == pytest.approx([5, 995], abs=1.5)


@pytest.mark.parametrize("name", ALL)
def test_nan_and_inf_are_errors_that_leave_the_observer_as_it_was(name: str) -> None:
    observer = create_observer(ObserverSpec(name), QUANT)
    observer.update(np.float32([-1, 2, 5]))
    before = observer.range()
    cases = {np.nan: "1 NaN and 0 inf", np.inf: "0 NaN and 1 inf", -np.inf: "0 NaN and 1 inf", 1e300: "0 NaN and 1 inf"}
    for bad, says in cases.items():
        # 1e300 is beyond float32.
        values = np.zeros((2, 3))
        values[1, 2] = bad
        with pytest.raises(CalibrationError, match=rf"{says} among 6 values, the first at \(1, 2\)"):
            observer.update(values)
    assert observer.range() == before
    assert observer.count == 3


@pytest.mark.parametrize("name", ALL)
def test_no_value_is_an_error_and_an_empty_array_is_none(name: str) -> None:
    observer = create_observer(ObserverSpec(name), QUANT)
    observer.update(np.zeros((0, 3), np.float32))
    assert observer.count == 0
    with pytest.raises(CalibrationError, match=rf"{name} observer: saw no value"):
        observer.range()
    observer.merge(create_observer(ObserverSpec(name), QUANT))
    with pytest.raises(CalibrationError):
        observer.range()


@pytest.mark.parametrize("name", ALL)
def test_any_float_type_shape_and_stride_is_taken(name: str) -> None:
    plain = np.float32([[1.5, -2.0, 0.0], [0.25, 8.0, -0.5]])
    wanted = create_observer(ObserverSpec(name), QUANT)
    wanted.update(plain)
    types = (np.float16, np.float64, ml_dtypes.bfloat16)
    for values in (*(plain.astype(kind) for kind in types), plain.T, plain[:, ::-1]):
        observer = create_observer(ObserverSpec(name), QUANT)
        observer.update(values)
        assert observer.range() == wanted.range()
    scalar = create_observer(ObserverSpec(name), QUANT)
    scalar.update(np.asarray(3.0, np.float32))
    assert scalar.count == 1
    assert [float(end) for end in scalar.range()] == [3.0, 3.0]


@pytest.mark.parametrize("name", ALL)
def test_only_the_same_kind_merges(name: str) -> None:
    other = "minmax" if name != "minmax" else "mse"
    with pytest.raises(TypeError, match="cannot merge"):
        create_observer(ObserverSpec(name), QUANT).merge(create_observer(ObserverSpec(other), QUANT))


def test_people_add_their_own() -> None:
    class Half:
        per_sample = False
        count = 1

        def __init__(self, quant: QuantSpec, *, share: float = 0.5) -> None:
            self.share = share

    try:
        register_observer("half")(Half)
        assert "half" in list_observers()
        made: Any = create_observer(ObserverSpec("half", (("share", 1),)), QUANT)
        assert made.share == 1
        with pytest.raises(ConfigError, match="registered already"):
            register_observer("half")(Half)
    finally:
        _REGISTRY.pop("half", None)


SPECS = (
    QuantSpec(),
    QuantSpec(bits=4),
    QuantSpec(signed=False, symmetric=False),
    QuantSpec(bits=3, signed=False, symmetric=False),
    QuantSpec(bits=16, signed=False, symmetric=False),
)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def _values(draw: Any) -> Any:
    """Few awkward values and many ordinary ones: any exponent, zeros, one or two signs, outliers, constants."""
    awkward = draw(hnp.arrays(np.float32, st.integers(0, 12), elements=FINITE))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 3000))
    body = rng.standard_normal(n) * 10.0 ** rng.uniform(-40, 30, n if draw(st.booleans()) else 1)
    kind = draw(st.sampled_from(["both", "relu", "negative", "constant", "clipped"]))
    if kind == "relu":
        body, awkward = np.maximum(body, 0), np.abs(awkward)
    elif kind == "negative":
        body, awkward = -np.abs(body), -np.abs(awkward)
    elif kind == "constant":
        body = np.full(n, body[0])
    elif kind == "clipped":
        body = np.clip(body, -np.abs(body[0]), np.abs(body[-1]))
    return np.concatenate([body.astype(np.float32), awkward])


def _cut(draw: Any, values: Any) -> list[Any]:
    return np.split(values, sorted(draw(st.lists(st.integers(0, values.size), max_size=6))))


def _grown(draw: Any, name: str, quant: QuantSpec, batches: list[Any]) -> tuple[bytes, int]:
    """One observer per few batches, then merged two by two in any order."""
    observers = []
    for batch in batches:
        if not observers or draw(st.booleans()):
            observers.append(create_observer(ObserverSpec(name), quant))
        observers[draw(st.integers(0, len(observers) - 1))].update(batch)
    while len(observers) > 1:
        taken = observers.pop(draw(st.integers(0, len(observers) - 1)))
        observers[draw(st.integers(0, len(observers) - 1))].merge(taken)
    low, high = observers[0].range()
    assert low.shape == high.shape == ()
    assert low.dtype == high.dtype == np.float64
    return low.tobytes() + high.tobytes(), observers[0].count


@pytest.mark.parametrize("name", [n for n in list_observers() if n != "moving_average"])
@settings(max_examples=40)
@given(data=st.data())
def test_any_order_any_batches_any_merges_give_the_same_bits(name: str, data: Any) -> None:
    quant = data.draw(st.sampled_from(SPECS))
    values = data.draw(_values())
    once = _grown(data.draw, name, quant, [values])
    shuffled = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).permutation(values)
    assert _grown(data.draw, name, quant, _cut(data.draw, shuffled)) == once
    assert once[1] == values.size


@settings(max_examples=60)
@given(data=st.data())
def test_the_mean_of_samples_does_not_depend_on_their_order(data: Any) -> None:
    samples = [s for s in _cut(data.draw, data.draw(_values())) if s.size]
    once = _grown(data.draw, "moving_average", QuantSpec(), samples)
    assert _grown(data.draw, "moving_average", QuantSpec(), data.draw(st.permutations(samples))) == once


@pytest.mark.parametrize("name", list_observers())
@settings(max_examples=30)
@given(data=st.data())
def test_the_range_lies_inside_what_was_seen(name: str, data: Any) -> None:
    values = data.draw(_values())
    observer = create_observer(ObserverSpec(name), data.draw(st.sampled_from(SPECS)))
    observer.update(values)
    low, high = observer.range()
    assert values.min() <= low <= high <= values.max()


@pytest.mark.parametrize("name", list_observers())
def test_negative_zero_is_zero(name: str) -> None:
    ends = set()
    for order in ([0.0, -0.0, 2.0], [-0.0, 0.0, 2.0], [2.0, -0.0, -0.0]):
        observer = create_observer(ObserverSpec(name), QuantSpec())
        observer.update(np.float32(order))
        ends.add(b"".join(end.tobytes() for end in observer.range()))
    assert len(ends) == 1


ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=FINITE)


def _count(histogram: Histogram, values: Any) -> Histogram:
    found = flatten_values(values)
    if found is not None:
        histogram.count_values(found)
    return histogram


def _seen(values: Any, bins: int = 2048) -> Histogram:
    return _count(Histogram(bins), values)


def _inside(view: HistogramView, values: Any) -> None:
    """Every non-zero value is counted in the bin whose edges enclose it."""
    edges = view.edges
    assert edges[0] == view.minimum == values.min()
    assert edges[-1] == view.maximum == values.max()
    assert (np.diff(edges) >= 0).all()
    numbers = np.trunc(np.ldexp(values[values != 0].astype(np.float64), -view.exponent)).astype(np.int64) - view.first
    np.testing.assert_array_equal(np.bincount(numbers, minlength=view.counts.size), view.counts)
    exact = values[values != 0].astype(np.float64)
    assert (edges[numbers] <= exact).all()
    assert (exact <= edges[numbers + 1]).all()
    assert view.zeros == (values == 0).sum()
    assert view.count == values.size


@given(ARRAYS)
def test_counts_equal_those_of_one_exact_pass(values: Any) -> None:
    histogram = Histogram(2048)
    for part in np.array_split(values, 3):
        _count(histogram, part)
    _inside(histogram.make_view(), values)
    assert histogram.count == values.size


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    x = np.random.default_rng(0).standard_normal(100_000)
    kinds = {"normal": x, "relu": np.maximum(x, 0), "far": 1000 + x, "negative": -np.abs(x)}
    kinds |= {"relu6": np.clip(3 * x, 0, 6), "gap": x + 40 * (x > 0), "negative relu": -np.maximum(x, 0)}
    return {name: values.astype(np.float32) for name, values in kinds.items()}


@pytest.mark.parametrize("name", ["normal", "relu", "far", "negative", "relu6"])
def test_no_data_waste_half_of_the_bins(data: dict[str, Any], name: str) -> None:
    view = _seen(data[name], 4096).make_view()
    _inside(view, data[name])
    assert 4096 <= view.counts.size <= 8192


def test_memory_does_not_grow_with_the_data() -> None:
    histogram = Histogram(4096)
    rng = np.random.default_rng(0)
    for k in range(40):
        _count(histogram, (rng.standard_normal(1000) * 3.0**k).astype(np.float32))
        assert histogram.make_view().counts.size <= 8192


@given(ARRAYS, st.integers(1, 600))
def test_coarser_views_keep_every_count_in_its_place(values: Any, bins: int) -> None:
    view = _seen(values).make_view()
    coarse = view.merge_bins(bins)
    _inside(coarse, values)
    assert coarse.counts.size >= min(bins, view.counts.size) - 1
    assert coarse.counts.size <= max(2 * bins + 1, 1) or coarse.exponent == view.exponent


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("name", ["normal", "relu", "far", "negative relu", "gap"])
def test_quantiles_are_right_to_a_bin(data: dict[str, Any], name: str, share: float) -> None:
    values = data[name]
    view = _seen(values).make_view()
    got = view.find_quantile(share * values.size, (1 - share) * values.size)
    low, high = np.quantile(values, [max(share - 2e-5, 0), min(share + 2e-5, 1)])
    width = 2.0**view.exponent
    assert low - 2 * width <= got <= high + 2 * width
    if share in (0.0, 1.0):
        assert got == (values.max() if share else values.min())


@given(ARRAYS, st.floats(0, 1))
def test_quantiles_of_the_mirrored_data_are_mirrored(values: Any, share: float) -> None:
    below = share * values.size
    above = values.size - below
    if below == above:
        return
    view = _seen(values).make_view()
    mirrored = _seen(-values).make_view().find_quantile(above, below)
    # Exact but for cumulated counts that float64 rounds.
    assert view.find_quantile(below, above) == pytest.approx(-mirrored, abs=1e-9 * 2.0**view.exponent, rel=0)


def test_other_bins_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="4096 bins into 2048"):
        Histogram(2048).add_histogram(Histogram(4096))
    empty = Histogram(2048)
    empty.add_histogram(Histogram(2048))
    assert empty.count == 0
