"""Wrong calls of fake_quantize."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import ConfigError
from tests.torch.fake_quant.kit import make_x
from torch_frontend.fake_quant import fake_quantize, op
from torch_frontend.fake_quant.kernels import ReferenceKernels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, dtype=torch.int32)}, r"x is torch\.int32"),
        ({"scale": torch.zeros(4, dtype=torch.int8)}, r"scale is torch\.int8"),
        ({"axis": 0}, r"scales of shape \(4,\) where a tensor of shape \(3, 4\) needs \(3,\)"),
        ({"axis": None}, "4 scales for a tensor quantized as a whole"),
        ({"axis": 2}, r"axis 2 is outside a tensor of shape \(3, 4\)"),
        ({"axis": -3}, "axis -3"),
        ({"zero_point": torch.zeros(3)}, r"zero_point \(3,\)"),
        ({"qmin": 7}, "qmin 7, qmax 7"),
        ({"qmax": 1 << 20}, "qmax 1048576"),
        ({"block_size": -1}, "block_size -1"),
        ({"block_size": 2}, r"needs \(3, 2\)"),
        ({"block_size": 2, "axis": None}, "block_size 2"),
        ({"edge": "floor"}, "edge 'floor'"),
        ({"scale": torch.zeros(4, device="meta")}, "scale on meta"),
        ({"scale": torch.tensor([1.0, 0.0, 1.0, 1.0])}, "scale 0 is not above 0"),
        ({"scale": torch.tensor([1.0, 1.0, 1.0, -0.5])}, r"scale -0\.5 is not above 0"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"x": make_x(3, 4), "scale": torch.ones(4), "zero_point": torch.zeros(4)}
    call |= {"qmin": -8, "qmax": 7, "axis": 1, **change}
    with pytest.raises(ConfigError, match=message):
        fake_quantize(call.pop("x"), call.pop("scale"), call.pop("zero_point"), **call)


def test_a_scale_that_is_not_above_zero_is_an_error_without_compiled_kernels_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "choose_kernels", lambda _: ReferenceKernels("asked for"))
    for scale in (0.0, -1.0):
        with pytest.raises(ConfigError, match="is not above 0"):
            fake_quantize(make_x(3), torch.tensor(scale), torch.tensor(0.0), qmin=-8, qmax=7)
    nan = fake_quantize(make_x(3), torch.tensor(float("nan")), torch.tensor(0.0), qmin=-8, qmax=7)
    assert nan.isnan().all()
