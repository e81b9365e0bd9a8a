"""A person's own metric: a function in a file, and what it may drop."""

import numpy as np
import onnxruntime
import pytest

from onnxq.errors import ConfigError, DataError
from onnxq.evaluation.metric import MetricModel, load_metric, parse_drop
from tests.evaluation.test_compare import product


def test_drops() -> None:
    assert parse_drop("1%").least(0.5) == pytest.approx(0.495)
    assert parse_drop("1%").least(-2.0) == pytest.approx(-2.02)
    assert parse_drop(0.01).least(0.5) == pytest.approx(0.49)
    assert [str(parse_drop(one)) for one in ("1%", 0.01)] == ["1%", "0.01"]
    for text in ("-1", "x", "inf", "nan", "%"):
        with pytest.raises(ConfigError):
            parse_drop(text)


def test_a_function_is_given_the_model_in_every_way() -> None:
    def agreement(given: MetricModel) -> float:
        feeds = {"x": np.ones((1, 16), np.float32)}
        other = onnxruntime.InferenceSession(given.path, providers=["CPUExecutionProvider"])
        ways = [given(feeds)["y"], given.session.run(None, feeds)[0], other.run(None, feeds)[0]]
        return float(np.mean([np.allclose(ways[0], way, rtol=1e-5) for way in ways]))

    assert load_metric(agreement)(product()) == 1.0


@pytest.mark.parametrize("value", [float("nan"), True, "0.5", None])
def test_a_metric_is_a_finite_number(value: object) -> None:
    with pytest.raises(DataError):
        load_metric(lambda _: value)(product())  # type: ignore[arg-type,return-value]


def test_a_function_that_raises_is_the_persons_fault() -> None:
    def broken(given: object) -> float:
        raise KeyError("top1")

    with pytest.raises(DataError, match="KeyError"):
        load_metric(broken)(product())


@pytest.mark.parametrize("source", ["evaluate.py", "evaluate:accuracy", "evaluate.py:not a name"])
def test_another_form_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"file\.py:function"):
        load_metric(source)
