"""Numbers of weights and biases: errors of the arithmetic name the site, and keep their kind and code."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxq.calibrate.constants import bias_numbers, find_tensor
from onnxq.calibrate.weights import weight_numbers
from onnxq.errors import CalibrationError, ConfigError, OnnxqError, PlanError
from onnxq.graph import GraphIndex, get_index
from onnxq.plan import SitePlan
from onnxq.sites import Edge, Role, Site, TensorId
from onnxq.spec import ObserverSpec, PerChannel, QParams, QuantSpec

X, W, B = TensorId("x"), TensorId("w"), TensorId("b")
CHANNELS = QuantSpec(granularity=PerChannel(0))


def layer(weight: np.ndarray | None = None) -> GraphIndex:
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,4] x) => (float[1,3] y) { y = Gemm <transB=1> (x, w, b) }"""
    )
    proto.graph.node[0].name = "gemm"
    values = np.ones((3, 4), np.float32) if weight is None else weight
    proto.graph.initializer.extend([numpy_helper.from_array(values, "w"), numpy_helper.from_array(BIAS, "b")])
    onnx.checker.check_model(proto)
    return get_index(proto)


BIAS = np.asarray([1.0, -2.0, 0.0], np.float32)


def weight_site(**fields: object) -> SitePlan:
    return SitePlan(site=W, role=Role.WEIGHT, spec=CHANNELS, **fields)


def bias_site(derived: tuple[Site, Site] | None = (X, W)) -> SitePlan:
    return SitePlan(site=B, role=Role.BIAS, spec=QuantSpec(bits=32, granularity=PerChannel(0)), derived=derived)


def scale(*values: float) -> QParams:
    array = np.asarray(values[0] if len(values) == 1 else values, np.float32)
    return QParams(array, np.zeros(array.shape, np.int32))


@pytest.mark.parametrize(
    ("observer", "code", "subject"),
    [
        (ObserverSpec("percentil"), "Q310", "w: weight observer 'percentil'"),
        (ObserverSpec("mse", (("bins", 3),)), "Q311", "w: weight observer 'mse'"),
    ],
)
def test_a_wrong_setting_is_named_beside_the_site(observer: ObserverSpec, code: str, subject: str) -> None:
    with pytest.raises(ConfigError) as caught:
        weight_numbers(layer(), [weight_site(observer=observer)], [], {})
    assert (caught.value.code, caught.value.subject) == (code, subject)


def test_a_weight_with_nan_is_named() -> None:
    with pytest.raises(CalibrationError, match="holds NaN or inf") as caught:
        weight_numbers(layer(np.full((3, 4), np.nan, np.float32)), [weight_site()], [], {})
    assert (caught.value.code, caught.value.subject) == ("Q503", "w")


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


def test_a_weight_scale_is_raised_for_a_bias_that_would_overflow() -> None:
    """A dead channel: its own values ask for the smallest scale, and the bias has to fit into int32 on it."""
    weight = np.ones((3, 4), np.float32)
    weight[1] = 0
    alone = weight_numbers(layer(weight), [weight_site()], [], {X: scale(1e-6)})[W].scale
    found = weight_numbers(layer(weight), [weight_site()], [bias_site()], {X: scale(1e-6)})[W].scale
    assert found[1] > alone[1]
    assert np.array_equal(found[[0, 2]], alone[[0, 2]])
    assert abs(BIAS[1]) / (np.float32(1e-6) * found[1]) <= 2**29 * 1.001


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


def test_only_constants_have_numbers_without_data() -> None:
    with pytest.raises(OnnxqError, match="is not a constant, as a weight must be"):
        weight_numbers(layer(), [SitePlan(site=X, role=Role.WEIGHT, spec=CHANNELS)], [], {})
