"""The integers of weights and biases: rounded, or carried by the plan and checked."""

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.calibrate.constants import quantize_constant
from onnxq.errors import PlanError
from onnxq.graph.storage import TENSOR_TYPES
from onnxq.numerics import weight_qparams
from onnxq.plan import SitePlan
from onnxq.sites import Role, TensorId
from onnxq.spec import STORAGE_BITS, PerChannel, QParams, QuantSpec

WEIGHT = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
SPEC = QuantSpec(granularity=PerChannel(0))
QPARAMS = weight_qparams(WEIGHT, SPEC)


def site(spec: QuantSpec = SPEC, role: Role = Role.WEIGHT, **fields: object) -> SitePlan:
    return SitePlan(site=TensorId("w"), role=role, spec=spec, **fields)


@pytest.mark.parametrize("storage", list(STORAGE_BITS))
def test_every_storage_has_a_type_in_onnx_and_in_numpy(storage: str) -> None:
    assert TensorProto.DataType.Name(TENSOR_TYPES[storage]).lower() == storage
    bits, signed = STORAGE_BITS[storage]
    kind = QuantSpec(bits=bits, signed=signed, storage=storage).code_type
    packed = dict.fromkeys(("int2", "int4"), "int8") | dict.fromkeys(("uint2", "uint4"), "uint8")
    assert kind == ({"float8e4m3fn": "float32"} | packed).get(storage, storage)


def test_a_bias_becomes_a_vector() -> None:
    spec = QuantSpec(bits=32)
    qparams = QParams(np.float32(0.5), np.int32(0))
    found = quantize_constant(site(spec, Role.BIAS), qparams, np.array([[1.0, -2.0]], np.float32))
    assert (found.dtype, found.tolist()) == (np.int32, [2, -4])


FAULTS = {
    "shape": (np.zeros((8, 3), np.int8), SPEC, ()),
    "type": (np.zeros((3, 8), np.int16), SPEC, ()),
    "range": (np.full((3, 8), 9, np.int8), QuantSpec(bits=4, storage="int8", granularity=PerChannel(0)), ()),
    "sums": (np.full((3, 8), 127, np.int8), SPEC, ((0, 1),)),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_values_that_do_not_fit_name_the_site(name: str) -> None:
    values, spec, orders = FAULTS[name]
    with pytest.raises(PlanError) as caught:
        quantize_constant(site(spec, values=values, sum_orders=orders), QPARAMS, WEIGHT)
    assert (caught.value.subject, caught.value.code) == ("w", "Q408")
    assert "overflow 16-bit sums" in caught.value.cause if name == "sums" else "do not fit" in caught.value.cause


def test_an_error_of_the_arithmetic_names_the_site() -> None:
    with pytest.raises(PlanError) as caught:
        quantize_constant(site(), QParams(np.ones(5, np.float32), np.zeros(5, np.int32)), WEIGHT)
    assert (caught.value.subject, caught.value.code) == ("w: scale", "Q407")
