"""Requests of callers: numbers that are none, passes nobody has, observers that something takes the place of."""

import math
from collections.abc import Callable

import pytest

import onnxq
from onnxq.errors import ConfigError
from tests.cli.kit import run
from tests.pipeline.models import images, residual

NAN = math.nan
NUMBERS: dict[str, Callable[[], object]] = {
    "min_sqnr": lambda: onnxq.quantize(residual(), images(), overrides={"min_sqnr": NAN}),
    "samples": lambda: onnxq.quantize(residual(), images(), overrides={"samples": 0}),
    "batch": lambda: onnxq.quantize(residual(), images(), overrides={"batch": 0}),
    "budget": lambda: onnxq.quantize(residual(), images(), overrides={"budget": math.inf}),
    "weight_bits_budget": lambda: onnxq.quantize(residual(), images(), overrides={"weight_bits_budget": NAN}),
    "max_drop": lambda: onnxq.quantize(residual(), images(), overrides={"metric": lambda model: 1.0, "max_drop": NAN}),
    "memory_limit": lambda: onnxq.apply(
        residual(), onnxq.make_plan(residual(), images()), overrides={"memory_limit": 0}
    ),
    "threads": lambda: onnxq.profile_model(residual(), None, images(), overrides={"threads": -1}),
    "seed": lambda: onnxq.make_plan(residual(), overrides={"seed": -1}),
    "min_cosine": lambda: onnxq.diff(residual(), residual(), images(), overrides={"min_cosine": NAN}),
    "top_k": lambda: onnxq.diff(residual(), residual(), images(), overrides={"top_k": 0}),
    "timeout": lambda: onnxq.prove(residual(), overrides={"engine": "ort", "timeout": NAN}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_none_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NUMBERS[name]()
    assert caught.value.subject.startswith("option: ")
    assert caught.value.subject.endswith(name)
    assert caught.value.fix


@pytest.mark.parametrize("option", ["--min-sqnr", "--min-cosine", "--max-abs", "--min-agreement", "--min-engines"])
def test_tolerances_of_diff_are_numbers(option: str) -> None:
    result = run("diff", "a.onnx", "b.onnx", option, "nan")
    assert (result.exit_code, "finite" in result.output) == (2, True)
    assert run("prove", "a.onnx", "--timeout", "inf").exit_code == 2


def test_weights_of_few_bits_say_so_too() -> None:
    skip = ["cross_layer_equalization", "bias_absorption", "smoothquant", "ranges", "promotion"]
    overrides = {"weights": {"bits": 3, "observer": "mse"}, "effort": "balanced", "skip": skip, "latency": False}
    found = onnxq.quantize(residual(), images(32), "virtual-int8", overrides=overrides)
    searched = [one for one in found.plan.sites if one.qparams is not None and "searched" in one.qparams.origin]
    assert searched
    (line,) = (line for line in found.report.accounts if line.startswith("rounding: "))
    assert f"in place of the observer mse at {searched[0].site}" in line
