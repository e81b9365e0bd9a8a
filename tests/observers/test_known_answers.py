"""Ranges against what theory, or a slow and literal search, says they are."""

import math
from typing import Any

import numpy as np
import pytest

from onnxq.numerics import fake_quant, qparams_from_range, quantize
from onnxq.observers import Entropy, HistogramView, aciq_alpha, create_observer
from onnxq.observers.base import flatten_values
from onnxq.observers.entropy import KullbackLeibler
from onnxq.observers.histogram import Histogram
from onnxq.observers.mse import SquaredError
from onnxq.spec import ObserverSpec, QuantSpec

N = 300_000
SIGNED, UNSIGNED = QuantSpec(), QuantSpec(signed=False, symmetric=False)


def _asymmetric(bits: int) -> QuantSpec:
    return QuantSpec(bits=bits, signed=False, symmetric=False)


def _laplace() -> Any:
    """Laplace(0, 1) by its own quantiles: no sampling noise."""
    p = (np.arange(N) + 0.5) / N
    return (np.sign(0.5 - p) * np.log(1 - 2 * np.abs(p - 0.5))).astype(np.float32)


def _gauss(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def _range(name: str, quant: QuantSpec, values: Any, **options: Any) -> tuple[float, float]:
    observer = create_observer(ObserverSpec(name, tuple(sorted(options.items()))), quant)
    observer.update(values)
    low, high = observer.range()
    return float(low), float(high)


def _cost(values: Any, low: float, high: float, quant: QuantSpec) -> float:
    rounded = fake_quant(values, qparams_from_range(low, high, quant), quant)
    return float(np.square(rounded - values).sum(dtype=np.float64))


# ACIQ ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "table"),
    [("gaussian", [1.71, 2.15, 2.55, 2.93, 3.28, 3.61, 3.92]), ("laplace", [2.83, 3.89, 5.03, 6.20, 7.41, 8.64, 9.89])],
)
def test_aciq_gives_the_table_of_the_paper(distribution: str, table: list[float]) -> None:
    assert [aciq_alpha(distribution, 2**bits) for bits in range(2, 9)] == pytest.approx(table, abs=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_aciq_measures_and_recognises_the_distribution(bits: int) -> None:
    for values, name in ((3 + 2 * _gauss(), "gaussian"), (3 + 2 * _laplace(), "laplace")):
        reach = 2 * aciq_alpha(name, 2**bits - 1)
        low, high = _range("aciq", _asymmetric(bits), values)
        assert (low, high) == pytest.approx((3 - reach, 3 + reach), rel=0.01, abs=0.02)
        assert _range("aciq", _asymmetric(bits), values, distribution=name) == (low, high)


def test_aciq_of_one_sided_values_is_half_of_a_distribution() -> None:
    relu = np.maximum(_gauss(), 0)
    assert _range("aciq", _asymmetric(4), relu) == pytest.approx((0.0, aciq_alpha("gaussian", 30)), rel=0.01)
    assert _range("aciq", _asymmetric(4), -relu) == pytest.approx((-aciq_alpha("gaussian", 30), 0.0), rel=0.01)
    assert _range("aciq", QuantSpec(bits=4), relu) == pytest.approx((0.0, aciq_alpha("gaussian", 14)), rel=0.01)
    half = np.abs(_laplace())
    assert _range("aciq", _asymmetric(4), half) == pytest.approx((0.0, aciq_alpha("laplace", 30)), rel=0.01, abs=1e-4)


# MSE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
def test_mse_counts_what_quantizing_the_density_itself_costs(bits: int) -> None:
    """Few and wide bins of a hand-made histogram, against values spread evenly in them."""
    view = HistogramView(
        first=-4, exponent=-2, counts=np.array([4, 0, 9, 1, 30, 7, 0, 2, 5]), zeros=100, minimum=-1.1, maximum=1.0
    )
    edges, dense = view.edges, 20_000
    assert edges.tolist() == [-1.1, -1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0, 1.0]  # 5 values of exactly 1
    spread = (np.arange(dense) + 0.5) / dense
    ranges = [(-1.1, 1.0), (-0.3, 0.9), (-1.1, 0.2), (0.0, 0.45), (-0.02, 0.01), (-3.0, 2.0), (-0.9, 1.2)]
    more = [QuantSpec(storage="float8e4m3fn")] if bits == 8 else []
    for quant in (QuantSpec(bits=bits), _asymmetric(bits), *more):
        for low, high in ranges:
            wanted = 0.0
            for a, b, count in zip(edges[:-1], edges[1:], view.counts, strict=True):
                wanted += count * _cost((a + (b - a) * spread).astype(np.float32), low, high, quant) / dense
            (got,) = SquaredError(view, quant)(np.array([low]), np.array([high]))
            # 16-bit steps are finer than bins: s^2 / 12 each, also for a point mass that meets its level.
            assert got == pytest.approx(wanted, rel=0.12 if bits == 16 else 2e-3, abs=1e-9)


@pytest.mark.parametrize(("bits", "gauss", "laplace"), [(4, 2.55, 5.03), (6, 3.28, 7.41), (8, 3.92, 9.89)])
def test_mse_finds_the_thresholds_of_theory(bits: int, gauss: float, laplace: float) -> None:
    for values, alpha in ((_gauss(), gauss), (_laplace(), laplace)):
        low, high = _range("mse", _asymmetric(bits), values)
        assert (high - low) / 2 == pytest.approx(alpha, rel=0.04)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["laplace", "student", "relu", "shifted"])
def test_mse_costs_no_more_than_a_fine_search_over_the_values_themselves(name: str, bits: int) -> None:
    rng = np.random.default_rng(3)
    n = 20_000
    data = {
        "laplace": rng.laplace(size=n),
        "student": rng.standard_t(3, n),
        "relu": np.maximum(rng.standard_normal(n), 0),
        "shifted": np.exp(0.5 * rng.standard_normal(n)) - 0.7,
    }
    values = data[name].astype(np.float32)
    top = float(np.abs(values).max())
    for quant in (QuantSpec(bits=bits), QuantSpec(bits=bits, narrow_range=True), QuantSpec(bits=bits, signed=False)):
        least = min(_cost(values, -top * f, top * f, quant) for f in np.geomspace(1, 0.02, 200))
        assert _cost(values, *_range("mse", quant, values), quant) <= 1.01 * least
    quant, low, high = _asymmetric(bits), float(min(values.min(), 0)), float(values.max())
    factors = np.geomspace(1, 0.05, 25)
    least = min(_cost(values, low * f, high * g, quant) for f in (factors if low else [1]) for g in factors)
    assert _cost(values, *_range("mse", quant, values), quant) <= 1.02 * least


def test_mse_of_fp8_keeps_outliers_that_int8_clips() -> None:
    """FP8 is fine near 0 by itself: clipping buys next to nothing."""
    values = _gauss()[:50_000].copy()
    values[:20] *= 30
    top, quant = float(np.abs(values).max()), QuantSpec(storage="float8e4m3fn")
    found = _range("mse", quant, values)
    least = min(_cost(values, -top * f, top * f, quant) for f in np.geomspace(1, 0.01, 80))
    assert _cost(values, *found, quant) <= 1.01 * least
    assert max(-found[0], found[1]) > 0.9 * top
    assert _range("mse", SIGNED, values)[1] < 0.7 * top


# KL --------------------------------------------------------------------------------------------------------------


def _literal_kl(values: Any, levels: int, bins: int = 2048) -> tuple[Any, Any]:
    """The slides, line by line: |x| in 2048 bins, every threshold from `levels` bins on, cells of equal width.

    Thresholds and their divergences.
    """
    magnitudes = np.abs(values[values != 0])
    width = magnitudes.max() / bins
    histogram = np.bincount(np.minimum((magnitudes / width).astype(int), bins - 1), minlength=bins).astype(float)
    found = []
    for i in range(levels, bins + 1):
        p = histogram[:i].copy()
        p[i - 1] += histogram[i:].sum()
        level = np.arange(i) * levels // i
        used = p > 0
        mass, number = np.bincount(level, histogram[:i], levels), np.bincount(level, used, levels)
        q = np.where(used, (mass / np.maximum(number, 1))[level], 0)
        p, q = p / p.sum(), q / q.sum()
        hole = ((q == 0) & used).any()
        found.append(math.inf if hole else float((p[used] * np.log(p[used] / q[used])).sum()))
    return (np.arange(levels, bins + 1) + 0.5) * width, np.array(found)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gauss", "laplace", "relu", "student"])
def test_entropy_agrees_with_the_literal_algorithm(name: str, bits: int) -> None:
    """Nearly as little divergence by the slides' own count, whose cells are half a step off the quantizer's."""
    rng = np.random.default_rng(4)
    n = 1_000_000
    x = {"laplace": rng.laplace, "student": lambda size: rng.standard_t(3, size)}.get(name, rng.standard_normal)(size=n)
    values = (np.maximum(x, 0) if name == "relu" else x).astype(np.float32)
    low, high = _range("entropy", QuantSpec(bits=bits), values)
    thresholds, divergences = _literal_kl(values, 2 ** (bits - 1))
    ours = max(-low, high)
    near = divergences[np.abs(thresholds / ours - 1) < 0.01]
    assert np.median(near[np.isfinite(near)]) <= 1.25 * divergences.min()
    assert ours == pytest.approx(thresholds[divergences.argmin()], rel=0.25)


def test_entropy_looks_at_the_data() -> None:
    """The ancestor gave 0.751 of the maximum whatever the data."""
    rng = np.random.default_rng(5)
    uniform = rng.uniform(-1, 1, N).astype(np.float32)
    student = rng.standard_t(2.5, N).astype(np.float32)
    assert _range("entropy", SIGNED, uniform)[1] > 0.99
    assert _range("entropy", SIGNED, student)[1] < 0.3 * np.abs(student).max()


@pytest.mark.parametrize("name", ["both", "relu", "skewed"])
def test_entropy_has_2048_bins_over_what_it_looks_at(name: str) -> None:
    values = {"both": _gauss(), "relu": np.maximum(_gauss(), 0), "skewed": np.abs(_gauss()) - 0.1}[name]
    for quant in (SIGNED, UNSIGNED):
        observer = Entropy(quant)
        observer.update(values)
        view = observer.make_reference()
        assert 2047 <= view.counts.size <= 4096
        assert view.minimum == (0 if quant.symmetric else values.min())
        assert view.maximum == (np.abs(values).max() if quant.symmetric else values.max())


def test_entropy_clips_each_long_tail_by_itself() -> None:
    rng = np.random.default_rng(6)
    values = np.where(rng.random(N) < 0.5, -rng.random(N), np.abs(rng.standard_t(2.5, N))).astype(np.float32)
    low, high = _range("entropy", UNSIGNED, values)
    assert low == pytest.approx(-1, abs=0.05)
    assert high < 0.4 * values.max()


def test_entropy_of_relu_is_not_drowned_by_zeros() -> None:
    relu = np.maximum(_laplace(), 0)
    more = np.concatenate([relu, np.zeros(20 * N, np.float32)])
    for quant in (SIGNED, UNSIGNED, _asymmetric(4)):
        assert _range("entropy", quant, more) == _range("entropy", quant, relu)
    assert _range("entropy", UNSIGNED, np.zeros(9, np.float32)) == (0.0, 0.0)


# Percentile, means -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
def test_percentile_keeps_its_share(percentile: float) -> None:
    values = np.concatenate([_gauss() - 1, np.maximum(_gauss(1), 0)])
    low, high = _range("percentile", UNSIGNED, values, percentile=percentile)
    tail = (100 - percentile) / 200
    assert (low, high) == pytest.approx(tuple(np.quantile(values, [tail, 1 - tail])), abs=0.003)
    low, high = _range("percentile", SIGNED, values, percentile=percentile)
    assert max(-low, high) == pytest.approx(np.quantile(np.abs(values), percentile / 100), abs=0.003)


def test_percentile_100_is_minmax_and_few_values_are_not_cut_far() -> None:
    values = _gauss()
    for quant in (SIGNED, UNSIGNED):
        assert _range("percentile", quant, values, percentile=100.0) == (values.min(), values.max())
        assert _range("percentile", quant, np.float32([-1, 0, 2])) == pytest.approx((-1, 2), abs=1e-3)


def test_moving_average_is_the_mean_of_the_samples_ends() -> None:
    observer = create_observer(ObserverSpec("moving_average"), SIGNED)
    for sample in ([-1.0, 3.0], [-2.0, 0.5], [0.25, 0.75]):
        observer.update(np.float32(sample))
    assert [float(end) for end in observer.range()] == [pytest.approx(-2.75 / 3), pytest.approx(4.25 / 3)]


def _divergence(view: HistogramView, spec: QuantSpec, low: float, high: float) -> float:
    """By the definition: P with what lies outside in its outermost bins, Q even over the bins of each level."""
    full = view.counts > 0
    centers = ((view.edges[:-1] + view.edges[1:]) / 2)[full].astype(np.float32)
    counts = view.counts[full].astype(float)
    inside = (centers >= low) & (centers <= high)
    kept = counts[inside]
    p = kept.copy()
    p[0] += counts[: np.argmax(inside)].sum()
    p[-1] += counts[len(counts) - np.argmax(inside[::-1]) :].sum()
    levels = quantize(centers[inside], qparams_from_range(low, high, spec), spec)
    q = np.array([kept[levels == level].mean() for level in levels])
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("spec", [QuantSpec(signed=False, symmetric=False), QuantSpec(bits=4), QuantSpec(bits=16)])
def test_divergence_is_that_of_the_definition(spec: QuantSpec) -> None:
    values, seen = flatten_values(np.random.default_rng(4).standard_normal(20_000) ** 3), Histogram(4096)
    seen.count_values(values)
    view = seen.make_view()
    low = np.array([-3.0, -0.2, -40.0, -1e-3, -90.0, -0.5])
    high = np.array([4.0, 0.1, 50.0, 2e-3, 90.0, 0.7])
    got = KullbackLeibler(view, spec)(low, high)
    wanted = [_divergence(view, spec, a, b) for a, b in zip(low, high, strict=True)]
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
    assert np.isinf(KullbackLeibler(view, spec)(np.array([500.0]), np.array([501.0]))).all()
