"""A script written for Sparsebit runs under its own names, with one DeprecationWarning for each."""

from pathlib import Path

import onnx
import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional

from onnxq.backends import load_config
from onnxq.errors import ConfigError, PlanError
from onnxq.sites import Role
from tests.torch import nets
from torch_frontend.quant_model import QuantModel, State

YAML = """BACKEND: virtual
SCHEDULE: {BN_TUNING: True}
W:
  QSCHEME: per-group-symmetric
  QUANTIZER: {TYPE: uniform, BIT: 4, GROUPSIZE: 4}
  OBSERVER: {TYPE: MINMAX}
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: uniform, BIT: 8}
  OBSERVER: {TYPE: MINMAX}
"""


def old(name: str) -> pytest.WarningsRecorder:
    return pytest.warns(DeprecationWarning, match=f"`{name}.*Sparsebit's name")


def make(**config: object) -> QuantModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return QuantModel(net.eval(), {"target": "virtual", **config})


def calibrate(model: QuantModel) -> QuantModel:
    return nets.calibrate(model, torch.randn(16, 8), asym=True, w_quant=True, a_quant=True)


def test_switches_and_training() -> None:
    model = calibrate(make())
    with old("set_quant"):
        model.set_quant(w_quant=True, a_quant=False)
    assert {q.enabled for q in model.quantizers.values() if q.role is Role.WEIGHT} == {True}
    assert {q.enabled for q in model.quantizers.values() if q.role is not Role.WEIGHT} == {False}
    with old("set_quant"):
        model.set_quant(a_quant=True)
    assert {q.enabled for q in model.quantizers.values() if q.role is Role.WEIGHT} == {False}
    with pytest.raises(TypeError, match="weight_quant"):
        model.set_quant(weight_quant=True)
    with old("init_QAT"):
        model.init_QAT()
    assert model.state is State.QUANTIZED
    assert model.training
    quantizer = next(iter(model.quantizers.values()))
    with old("disable_quant"):
        quantizer.disable_quant()
    assert not quantizer.active
    with old("enable_quant"):
        quantizer.enable_quant()
    assert quantizer.active


def test_errors_of_layers() -> None:
    model = calibrate(make()).set_quant()
    x = torch.randn(16, 8)
    with old("get_quantization_error"):
        alone = model.get_quantization_error(x, functional.mse_loss, is_async=True)
    assert alone == pytest.approx(model.quantization_error(x, "mse", "isolated"))
    with old("get_quantization_error"):
        together = model.get_quantization_error(x, is_async=False)
    assert together == model.quantization_error(x, "mse", "cumulative")


def test_bits_of_the_last_layer() -> None:
    model = make(weights={"bits": 4})
    with old("set_lastmodule_wbit"):
        model.set_lastmodule_wbit(bit=8)
    assert [q.spec.bits for q in model.quantizers.values() if q.role is Role.WEIGHT] == [4, 8]
    calibrate(model)
    with old("set_lastmodule_wbit"), pytest.raises(PlanError, match="before calibration"):
        model.set_lastmodule_wbit()


def test_diagram(tmp_path: Path) -> None:
    with old("dump_mermaid"):
        make().dump_mermaid(tmp_path / "g.mmd")
    assert (tmp_path / "g.mmd").read_text().startswith("graph TD")


def test_export_with_dynamic_axes_and_bits(tmp_path: Path) -> None:
    model, x = calibrate(make(weights={"bits": 4})), torch.randn(3, 8)
    axes = {"x": {0: "n"}, "y": {0: "n"}}
    for _ in range(2):
        with old("QuantModel.export_onnx"):
            done = model.export_onnx(x, tmp_path / "net.onnx", ["x"], ["y"], axes, opset_version=13, extra_info=True)
    assert done.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    extra = onnx.load(tmp_path / "net_extra.onnx")
    pairs = [node for node in extra.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {next(a.i for a in node.attribute if a.name == "bits") for node in pairs} == {4, 8}
    with old("QuantModel.export_onnx"), pytest.raises(ConfigError, match=r"dynamic_axes\['z'\]: is no input"):
        model.export_onnx(x, tmp_path / "net.onnx", ["x"], ["y"], {"z": [0]})


def test_backends_and_yaml(tmp_path: Path) -> None:
    with old('"onnxruntime"'):
        assert QuantModel(nn.Sequential(nn.Linear(8, 4)), target="onnxruntime").quant_config.target == "ort"
    with old('"tensorrt"'):
        assert make(extends="trt-int8", target="tensorrt").quant_config.target == "trt"
    (tmp_path / "q.yaml").write_text(YAML)
    config = load_config(tmp_path / "q.yaml")
    assert not config.torch.fuse_bn
    assert (config.weights.granularity, config.weights.block_size) == ("block", 4)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model = calibrate(QuantModel(net.eval(), config))
    assert [q.qparams().scale.shape for q in model.quantizers.values() if q.role is Role.WEIGHT] == [(8, 2), (4, 2)]
