"""Numbers of biases, and the constants of sites: errors name the site, and keep their kind and code."""

from __future__ import annotations

import pytest

from onnxq.calibrate.constants import bias_numbers, find_tensor
from onnxq.errors import PlanError
from onnxq.sites import Edge, Site, TensorId
from onnxq.spec import QParams
from tests.calibrate.kit import B, W, X, bias_site, layer, scale


@pytest.mark.parametrize("x", [scale(0.1, 0.2), scale(0.1)])
def test_a_bias_that_does_not_fit_is_named(x: QParams) -> None:
    with pytest.raises(PlanError) as caught:
        bias_numbers(layer(), [bias_site()], {X: x, W: scale(0.1, 0.2)})
    assert (caught.value.code, caught.value.subject) == ("Q407", "b")


def test_a_bias_without_a_derivation_is_a_fault_of_the_plan() -> None:
    with pytest.raises(PlanError, match="the weight it derives from") as caught:
        bias_numbers(layer(), [bias_site(None)], {})
    assert caught.value.code == "Q403"


def test_a_bias_waits_for_both_of_its_scales() -> None:
    assert bias_numbers(layer(), [bias_site()], {W: scale(1, 1, 1)}) == {}
    found = bias_numbers(layer(), [bias_site()], {X: scale(0.5), W: scale(1, 2, 4)})
    assert found[B].scale.tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (TensorId("nobody"), "the model has no such tensor"),
        (Edge("gemm", 3), "this input is not connected"),
        (Edge("gemm", 7), "this input is not connected"),
    ],
)
def test_a_site_that_is_not_there_is_an_error(site: Site, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        find_tensor(layer(), site)
    assert (caught.value.subject, caught.value.code) == (str(site), "Q404")


def test_sites_that_are_there_are_their_tensors() -> None:
    assert find_tensor(layer(), W) == W
    assert find_tensor(layer(), Edge("gemm", 2)) == B
