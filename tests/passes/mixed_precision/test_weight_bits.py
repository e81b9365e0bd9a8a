"""Bits by an average: the choice against brute force, and the measurement against quantizing by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from onnxq.config import Config, Rule
from onnxq.data import load_data
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.numerics import fake_quant
from onnxq.passes.mixed_precision.weight_bits import WeightChoice, compute_mean_bits, measure_isolated, spend_budget
from onnxq.progress import silent
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.evaluation.selecting import network
from tests.evaluation.selecting import samples as tokens
from tests.pipeline.models import find_worst_db, images, list_accounts, quantize, residual

EVERYTHING = Rule(op="*", set={"quantize": True})  # type: ignore[arg-type]


def config(**raw: object) -> Config:
    return Config.model_validate({"weights": {"bits": 4, "granularity": "channel"}, "rules": (EVERYTHING,), **raw})


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize(("average", "widths"), [(4.5, ()), (5.0, (4, 8)), (8.0, ())])
def test_weights_get_bits_within_the_average(effort: str, average: float, widths: tuple[int, ...]) -> None:
    wish = config(effort=effort, weight_bits_budget=average, weight_bits=widths, skip=("promotion",))
    plan = quantize(residual(), images(40), wish).plan
    index = GraphIndex(name_nodes(residual()))
    weights = [site for site in plan.sites if site.role is Role.WEIGHT]
    sizes = [index.find_constant(site.site).size for site in weights]  # type: ignore[arg-type,union-attr]
    bits = [site.spec.bits for site in weights]
    assert compute_mean_bits(sizes, bits) <= average
    assert set(bits) <= ({*widths} or set(range(4, 9)))
    assert max(bits) > 4
    if average == 8.0:
        assert bits == [8] * len(bits)
    for site in weights:
        if site.values is not None:
            assert abs(site.values.astype(int)).max() < 2 ** (site.spec.bits - 1) + 1


def test_packed_weights_get_a_byte_when_they_outgrow_it() -> None:
    weights = {"bits": 4, "granularity": "channel", "storage": "int4"}
    wish = config(weights=weights, weight_bits_budget=5.0, weight_bits=(4, 8), effort="fast")
    result = quantize(residual(), images(40), wish)
    stored = {site.spec.bits: site.spec.storage for site in result.plan.sites if site.role is Role.WEIGHT}
    assert stored == {4: "int4", 8: "int8"}
    assert [line for line in list_accounts(result, "weight_bits") if "(at most 5)" in line]


def test_what_a_rule_says_stays_and_more_bits_help() -> None:
    pinned = Rule(op="Gemm", role="weight", set={"bits": 2, "quantize": True})  # type: ignore[arg-type]
    wish = config(weight_bits_budget=6.0, rules=(pinned, EVERYTHING), effort="fast")
    result = quantize(residual(), images(40), wish)
    gemm = [s for s in result.plan.sites if s.role is Role.WEIGHT and s.consumers and "Gemm" in s.consumers[0].node]
    assert [site.spec.bits for site in gemm] == [2]
    poor, rich = (
        quantize(residual(), images(40), config(effort="fast", **budget))
        for budget in ({}, {"weight_bits_budget": 6.0})
    )
    assert find_worst_db(rich) > find_worst_db(poor) + 6


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"weights": {"bits": 8}, "weight_bits_budget": 4.9}, "weights of 8 bits cannot be 4.9 on average"),
        ({"weight_bits_budget": 5.0, "weight_bits": (3, 8)}, "3 is less than the 4 bits"),
    ],
)
def test_an_average_that_cannot_be_kept_is_refused(raw: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quantize(residual(), images(), config(**raw))
    assert says in str(caught.value)


# ---- The choice against brute force.


def left(weights: list[WeightChoice], bits: tuple[int, ...] | list[int]) -> float:
    return sum(one.error * 4.0 ** (one.bits - b) for one, b in zip(weights, bits, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(1e-6, 1.0)), min_size=1, max_size=4),
    st.floats(4.0, 8.0),
    st.sampled_from([(8,), (5, 6, 7, 8), (6, 8)]),
)
@settings(max_examples=80)
def test_the_average_is_kept_and_used(sizes: list[tuple[int, float]], average: float, widths: tuple[int, ...]) -> None:
    weights = [WeightChoice(n, 4, error, widths) for n, error in sizes]
    bits = spend_budget(weights, average)
    counts = [one.elements for one in weights]
    assert compute_mean_bits(counts, bits) <= average + 1e-9
    assert set(bits) <= {4, *widths}
    fitting = [
        way
        for way in itertools.product((4, *widths), repeat=len(weights))
        if compute_mean_bits(counts, list(way)) <= average + 1e-9
    ]
    # Greedy misses at most what the room for one more weight would have bought.
    most = max(one.elements for one in weights) * (max(widths) - 4) / sum(counts)
    poorer = [way for way in fitting if compute_mean_bits(counts, list(way)) <= average - most]
    if poorer:
        assert left(weights, bits) <= min(left(weights, way) for way in poorer) * (1 + 1e-9)


def test_error_per_bit_decides_and_not_size() -> None:
    small, large = WeightChoice(100, 4, 1e-6, (8,)), WeightChoice(400, 4, 1e-2, (8,))
    assert spend_budget([small, large], 7.2) == [4, 8]
    # The same error in fewer elements is had first.
    assert spend_budget([WeightChoice(100, 4, 1e-2, (8,)), large], 5.0) == [8, 4]


def test_what_cannot_change_counts() -> None:
    one, fixed, wide = (WeightChoice(100, bits, 1.0, widths) for bits, widths in ((4, (8,)), (4, ()), (8, ())))
    assert spend_budget([one, fixed], 6.0) == [8, 4]
    assert spend_budget([one, fixed], 5.9) == [4, 4]
    assert spend_budget([one, wide], 4.0) == [4, 8]
    assert spend_budget([], 4.0) == []


# ---- Errors of each weight alone, against quantizing it by hand.


def test_measured_errors_are_those_of_each_weight_alone() -> None:
    proto = residual()
    result = quantize(proto, images(), config(effort="fast"))
    samples = [{"x": images()["x"][k : k + 1]} for k in range(4)]
    data = load_data(samples, GraphIndex(name_nodes(proto)).inputs)
    found = measure_isolated(name_nodes(proto), result.plan, samples, data, rounded=False, progress=silent)
    weights = [site for site in result.plan.sites if site.role is Role.WEIGHT]
    assert set(found) == {site.site for site in weights}
    index = GraphIndex(name_nodes(proto))
    plain = Session(proto, optimize=False)
    for site in weights:
        edge = site.consumers[0]
        name = index.find_node(edge.node).inputs[edge.index]
        changed = name_nodes(proto)
        tensor = next(t for t in changed.graph.initializer if t.name == name)
        value = numpy_helper.to_array(tensor)
        tensor.raw_data = fake_quant(value, site.qparams, site.spec).astype(np.float32).tobytes()
        other = Session(changed, optimize=False)
        exact, got = ([net.run(sample)["y"].astype(np.float64) for sample in samples] for net in (plain, other))
        error = np.square(np.subtract(exact, got)).sum() / np.square(exact).sum()
        assert found[site.site] == pytest.approx(float(error), rel=1e-3)


def test_rows_that_change_places_are_no_error_of_a_weight() -> None:
    """The scores of two boxes are as close as rounding: which comes first hangs on the weights of all layers."""
    proto, rows = network("detector"), dict(tokens(6))
    result = quantize(proto, rows, config(weights={"bits": 6}, effort="fast"))
    samples = [{"x": row[None]} for row in rows["x"]]
    data = load_data(samples, GraphIndex(name_nodes(proto)).inputs)
    found = measure_isolated(proto, result.plan, samples, data, rounded=False, progress=silent)
    assert {site.name for site in found} == {"w_body", "w_box", "w_score"}
    assert all(0 < error < 0.02 for error in found.values())
