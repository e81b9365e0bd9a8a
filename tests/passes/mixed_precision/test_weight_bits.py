"""Bits by an average: the choice against brute force, and the measurement against quantizing by hand."""

from __future__ import annotations

import pytest

import onnxq
from onnxq.config import Config, Rule
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.passes.mixed_precision.weight_bits import compute_mean_bits
from onnxq.sites import Role
from tests.pipeline.models import images, residual

EVERYTHING = Rule(op="*", set={"quantize": True})  # type: ignore[arg-type]


def config(**raw: object) -> Config:
    return Config.model_validate({"weights": {"bits": 4, "granularity": "channel"}, "rules": (EVERYTHING,), **raw})


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize(("average", "widths"), [(4.5, ()), (5.0, (4, 8)), (8.0, ())])
def test_weights_get_bits_within_the_average(effort: str, average: float, widths: tuple[int, ...]) -> None:
    wish = config(effort=effort, weight_bits_budget=average, weight_bits=widths, skip=("promotion",))
    plan = onnxq.quantize(residual(), images(40), wish, overrides={"latency": False}).plan
    index = GraphIndex(name_nodes(residual()))
    weights = [site for site in plan.sites if site.role is Role.WEIGHT]
    sizes = [index.constant(site.site).size for site in weights]  # type: ignore[arg-type,union-attr]
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
    wish = config(
        weights={"bits": 4, "granularity": "channel", "storage": "int4"},
        weight_bits_budget=5.0,
        weight_bits=(4, 8),
        effort="fast",
    )
    result = onnxq.quantize(residual(), images(40), wish, overrides={"latency": False})
    stored = {site.spec.bits: site.spec.storage for site in result.plan.sites if site.role is Role.WEIGHT}
    assert stored == {4: "int4", 8: "int8"}
    assert [line for line in result.report.accounts if line.startswith("weight_bits: ") and "(at most 5)" in line]


def test_what_a_rule_says_stays_and_more_bits_help() -> None:
    pinned = Rule(op="Gemm", role="weight", set={"bits": 2, "quantize": True})  # type: ignore[arg-type]
    wish = config(weight_bits_budget=6.0, rules=(pinned, EVERYTHING), effort="fast")
    result = onnxq.quantize(residual(), images(40), wish, overrides={"latency": False})
    gemm = [s for s in result.plan.sites if s.role is Role.WEIGHT and s.consumers and "Gemm" in s.consumers[0].node]
    assert [site.spec.bits for site in gemm] == [2]
    poor, rich = (
        onnxq.quantize(residual(), images(40), config(effort="fast", **budget), overrides={"latency": False})
        for budget in ({}, {"weight_bits_budget": 6.0})
    )
    assert rich.report.checks[0].sqnr_db[0] > poor.report.checks[0].sqnr_db[0] + 6


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"weights": {"bits": 8}, "weight_bits_budget": 4.9}, "weights of 8 bits cannot be 4.9 on average"),
        ({"weight_bits_budget": 5.0, "weight_bits": (3, 8)}, "3 is less than the 4 bits"),
    ],
)
def test_an_average_that_cannot_be_kept_is_refused(raw: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        onnxq.quantize(residual(), images(), config(**raw), overrides={"latency": False})
    assert says in str(caught.value)
