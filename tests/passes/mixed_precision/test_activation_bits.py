"""Bits of activations for the NPU: as few wide operators as the noise allows, unless a person says which."""

import re
from functools import cache
from typing import Any

import onnxq
from onnxq.plan import to_json
from onnxq.sites import Role
from tests.backends.qnn.nets import make_model, make_samples
from tests.pipeline import models
from tests.pipeline.models import list_accounts


@cache
def quantize(min_sqnr: float | None = None, wide: str = "") -> onnxq.Result:
    model = make_model(("tables", "residual and constant", "attention"))
    rules = [{"node": wide, "role": "activation", "set": {"bits": 16}}] if wide else []
    # The search behind it, for what no width of integers holds, is for tests of its own.
    overrides: dict[str, Any] = {"verify.emulated": 0, "effort": "fast", "rules": rules, "skip": ["promotion"]}
    if min_sqnr is not None:
        overrides["min_sqnr"] = min_sqnr
    return models.quantize(model, make_samples(model, 6), "qnn-mixed", **overrides)


def count_wide(result: onnxq.Result) -> tuple[int, int, int]:
    """Wide operators, all, and conversions, by the line of the summary."""
    (line,) = list_accounts(result, "activation_bits")
    told = r"(\d+) of (\d+) operators in 16 bits, \d+% of the work; the others in 8; (\d+) conversions"
    found = re.search(told, line)
    return int(found[1]), int(found[2]), int(found[3])


def test_at_most_half_are_wide_and_the_summary_says_how_many() -> None:
    result = quantize()
    wide, total, conversions = count_wide(result)
    assert 0 < wide <= total / 2
    assert conversions == sum("/in" in str(s.site) for s in result.plan.sites if s.role is Role.ACTIVATION)
    assert {site.spec.bits for site in result.plan.sites if site.role is Role.ACTIVATION} == {8, 16}


def test_more_noise_takes_fewer_wide_operators() -> None:
    counts = [count_wide(quantize(least))[0] for least in (5.0, 40.0)]
    assert counts == sorted(counts)
    # LayerNormalization is never narrow; what is asked for may take all operators.
    assert (counts[0], counts[-1]) == (1, count_wide(quantize())[1])


def test_the_choice_is_the_same_each_time() -> None:
    assert to_json(quantize.__wrapped__().plan) == to_json(quantize().plan)


def test_rules_of_the_person_stand() -> None:
    bits = {str(site.site): site.spec.bits for site in quantize(5.0, "ty/Mul").plan.sites}
    wanted = {"ts": 8, "tt": 8, "ty/Mul/in0": 16, "ty/Mul/in1": 16, "ty": 16}
    assert {name: bits[name] for name in wanted} == wanted
