"""Limits of targets, and qparams that no target can hold."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from onnxq.spec import FLOAT8, PerChannel, QParams, QuantSpec
from tests.torch.quantizers.kit import UINT8
from torch_frontend.quantizers import (
    create_quantizer,
)


def test_target_is_an_argument_and_knows_its_limits() -> None:
    for spec in (UINT8, QuantSpec(signed=False), QuantSpec(symmetric=False)):
        with pytest.raises(ConfigError, match=r"relu\.out: trt holds no zero point"):
            create_quantizer("uniform", spec, site="relu.out", target="trt")
        create_quantizer("uniform", spec, site="relu.out", target="ort")
    with pytest.raises(ConfigError, match="there is none of this name"):
        create_quantizer("uniform", UINT8, site="relu.out", target="tensorrt")
    quantizer = create_quantizer("uniform", QuantSpec(), site="relu.out", target="trt")
    with pytest.raises(CalibrationError, match=r"relu\.out: zero point 3, and trt holds only 0"):
        quantizer.load_qparams(QParams(np.float32(0.1), np.int32(3)))
    donor = create_quantizer("uniform", QuantSpec(symmetric=False), site="relu.out")
    donor.calc_qparams_with_minmax(0, 1)
    with pytest.raises(CalibrationError, match="trt holds only 0"):
        quantizer.load_state_dict(donor.state_dict())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (QParams(np.float32(0.0), np.int32(0)), "not a positive number"),
        (QParams(np.float32(np.nan), np.int32(0)), "not a positive number"),
        (QParams(np.float32(1.0), np.int32(1)), "symmetric scheme has 0"),
        (QParams(np.float32([1.0]), np.int32(0)), "same shape|shape"),
    ],
)
def test_impossible_numbers_name_the_site(numbers: QParams, message: str) -> None:
    quantizer = create_quantizer("uniform", QuantSpec(), site="add.out")
    with pytest.raises(CalibrationError, match=rf"add\.out: .*{message}"):
        quantizer.load_qparams(numbers)
    free = create_quantizer("uniform", UINT8, site="add.out")
    with pytest.raises(CalibrationError, match="outside the range"):
        free.load_qparams(QParams(np.float32(1.0), np.int32(256)))


def test_wrong_wishes() -> None:
    with pytest.raises(ConfigError, match=r"a: .*fake-quantized training"):
        create_quantizer("uniform", QuantSpec(storage=FLOAT8), site="a")
    with pytest.raises(ConfigError, match="weights only"):
        create_quantizer("adaround", QuantSpec(), site="a")
    with pytest.raises(ConfigError, match=r"a: lsq has no option 'int'.*\n.*init"):
        create_quantizer("lsq", QuantSpec(), site="a", options={"int": "paper"})
    with pytest.raises(ConfigError, match="init='papers'"):
        create_quantizer("lsq", QuantSpec(), site="a", options={"init": "papers"})
    with pytest.raises(ConfigError, match="not a float"):
        create_quantizer("pact", UINT8, site="a", options={"alpha": "10"})
    with pytest.raises(ConfigError, match="not positive"):
        create_quantizer("pact", UINT8, site="a", options={"alpha": -1.0})
    with pytest.raises(ConfigError, match="one clipping level"):
        create_quantizer("pact", QuantSpec(granularity=PerChannel(1)), site="a")
    with pytest.raises(ConfigError, match="symmetrically"):
        create_quantizer("lsq+", UINT8, site="a", role=Role.WEIGHT)
