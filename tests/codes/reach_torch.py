"""What provokes the codes of the torch front end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxq.spec import QParams, QuantSpec
from tests.codes.kit import reach, reach_each


def front_end() -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")
    from torch_frontend.quant_model import QuantModel

    return torch, torch.nn, QuantModel


def linear() -> Any:
    _, nn, quant_model = front_end()
    return quant_model(nn.Sequential(nn.Linear(4, 3)), target="virtual")


def calibrated() -> Any:
    torch, _n, _q = front_end()
    made = linear()
    made.prepare_calibration()
    made(torch.randn(8, 4))
    made.calc_qparams()
    return made


def of(compute: Any) -> Any:
    """A module that computes this."""
    _, nn, _ = front_end()

    class Of(nn.Module):
        def forward(self, x: Any) -> Any:
            return compute(x)

    return Of()


@reach("Q121")
def half_precision(folder: Path):
    torch, _n, _q = front_end()
    pytest.importorskip("onnxscript")
    from torch_frontend.export.run import to_onnx

    to_onnx(calibrated().to(torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16))


@reach("Q122")
def not_exported(_: Path):
    torch, _nn, _q = front_end()
    pytest.importorskip("onnxscript")
    from torch_frontend.export.graph import export_with_markers
    from torch_frontend.tracing.modules import Inputs

    names = ("opset", "dynamic_shapes", "input_names", "output_names")
    free = dict.fromkeys(names)
    inputs = Inputs((torch.zeros(2, 4),), {})
    export_with_markers(of(lambda x: x if x.sum() > 0 else -x), inputs, optimize=True, **free)


@reach("Q123")
def no_quantized_class(_: Path):
    _t, nn, _q = front_end()
    from torch_frontend.qmodules.layers import swap_class

    swap_class(nn.Dropout())


@reach("Q124")
def no_block(_: Path):
    _t, nn, _q = front_end()
    from torch_frontend.reconstruct.units import module_unit

    module_unit(nn.Sequential(nn.Linear(4, 3)), "none")


@reach("Q205")
def wrong_batch(_: Path):
    torch, nn, quant_model = front_end()
    quant_model(nn.Sequential(nn.Linear(4, 3)), target="virtual", example_inputs=(torch.zeros(1, 4), torch.zeros(1)))


@reach("Q316")
def no_such_scheme(_: Path):
    front_end()
    from torch_frontend.quantizers.specs import check_spec

    check_spec(QuantSpec(bits=32), "w", "virtual")


@reach("Q318")
def no_step(_: Path):
    front_end()
    from torch_frontend.qat.training import Schedule

    Schedule(weights=-1)


@reach("Q410")
def no_batch_norm(_: Path):
    torch, _n, _q = front_end()
    made = calibrated()
    with made.batchnorm_tuning():
        made(torch.zeros(2, 4))


@reach("Q509")
def no_legal_scale(_: Path):
    front_end()
    from torch_frontend.quantizers.specs import check_qparams

    numbers = QParams(np.asarray(-1.0, np.float32), np.asarray(0, np.int32), "by hand")
    check_qparams(numbers, QuantSpec(bits=8), "w", "virtual")


@reach("Q510")
def broken_scale(_: Path):
    torch, _n, _q = front_end()
    from torch_frontend.quantizers.upkeep import PostStep

    PostStep.__new__(PostStep)._report_faults(["w"], torch.tensor([False]))


@reach("R108")
def not_traced(_: Path):
    _t, _n, quant_model = front_end()
    return quant_model(of(lambda x: x if x.sum() > 0 else -x), target="virtual").refusals


@reach("R109")
def unknown_call(_: Path):
    torch, _n, quant_model = front_end()
    return quant_model(of(lambda x: torch.fft.rfft(x).abs()), target="virtual").refusals


@reach("R110")
def no_plain_weight(_: Path):
    _t, nn, quant_model = front_end()
    return quant_model(nn.Sequential(nn.Embedding(10, 4, max_norm=1.0)), target="virtual").refusals


@reach("W119")
def slow_kernels(_: Path):
    front_end()
    from torch_frontend.fake_quant.kernels import SlowFakeQuantWarning, _fall_back

    with pytest.warns(SlowFakeQuantWarning, match=r"\[W119\]") as caught:
        _fall_back("a strange device", "there is none")
    return [one.message for one in caught]


@reach("W126")
def another_network_in_the_export(folder: Path):
    torch, _nn, _q = front_end()
    from torch_frontend.export import ExportWarning, export_onnx

    inner = calibrated().set_quant().model
    other = of(lambda x: inner(x) * 2 if torch.onnx.is_in_onnx_export() else inner(x))
    other.inner = inner
    with pytest.warns(ExportWarning, match=r"\[W126\]") as caught:
        export_onnx(other.eval(), folder / "net.onnx", torch.randn(8, 4), target="virtual")
    return [one.message for one in caught if isinstance(one.message, ExportWarning)]


reach_each(
    {"Q409": lambda _: linear().calc_qparams(), "Q508": lambda _: next(iter(linear().quantizers.values())).qparams()}
)
