"""Activations on scales of each run: as ONNX Runtime computes them, trained straight through, exported."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

import onnxq
from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.runtime import Session
from onnxq.spec import PerChannel, QParams, QuantSpec
from tests.networks import parse_text
from tests.torch.nets import observe, take_step
from torch_frontend import qat
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import Dynamic, create_quantizer

UINT8 = QuantSpec(signed=False, symmetric=False)
INT8 = QuantSpec()
SCALES: list[dict[str, Any]] = [{}, {"scales": "token"}, {"scales": "block", "block_size": 4}]


def make_data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, shape[-1])


@pytest.mark.parametrize("spec", [UINT8, INT8], ids=["uint8", "int8"])
@pytest.mark.parametrize("options", SCALES, ids=["tensor", "token", "block"])
def test_every_group_has_the_scale_of_its_own_range(spec: QuantSpec, options: dict[str, Any]) -> None:
    x = make_data(3, 5, 8).requires_grad_()
    y = create_quantizer("dynamic", spec, site="x", options=options)(x)
    rows = {"token": (-1, 8), "block": (-1, 4)}.get(options.get("scales", "tensor"), (1, -1))
    given, made = x.detach().reshape(rows), y.detach().reshape(rows)
    low, high = given.amin(1).clamp(max=0), given.amax(1).clamp(min=0)
    steps = (high - low) / 255 if spec is UINT8 else torch.maximum(-low, high) / 127
    assert ((made - given).abs().amax(1) <= 0.5001 * steps).all()
    assert torch.allclose((made / steps[:, None]).round() * steps[:, None], made, atol=1e-5)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_the_tensor_is_quantized_as_by_dynamic_quantize_linear() -> None:
    text = """g (float[a, b] x) => (float[a, b] y) {
        q, s, z = DynamicQuantizeLinear (x)  y = DequantizeLinear (q, s, z)
    }"""
    session, quantizer = Session(parse_text(text, opset=13)), create_quantizer("dynamic", UINT8, site="x")
    for x in (make_data(4, 6), make_data(4, 6).abs(), -make_data(4, 6).abs(), torch.zeros(2, 3)):
        np.testing.assert_array_equal(quantizer(x).numpy(), session.run({"x": x.numpy()})["y"])


def test_types_empty_tensors_and_switches() -> None:
    quantizer = create_quantizer("dynamic", INT8, site="x", options={"scales": "token"})
    assert quantizer(make_data(2, 4).bfloat16()).dtype == torch.bfloat16
    assert quantizer(torch.zeros(0, 4)).shape == (0, 4)
    quantizer.enabled = False
    assert torch.equal(quantizer(make_data(2, 4)), make_data(2, 4))
    assert not quantizer.state_dict()
    assert "per token, at each run, off" in repr(quantizer)


def test_wrong_settings_are_refused() -> None:
    one = QParams(np.float32(1), np.int32(0))
    with pytest.raises(CalibrationError, match="at each run"):
        create_quantizer("dynamic", INT8, site="x").load_qparams(one)
    for spec, options in (
        (QuantSpec(granularity=PerChannel(0)), {}),
        (QuantSpec(symmetric=False), {}),
        (QuantSpec(signed=False, symmetric=False, dynamic=True), {"scales": "token"}),
        (INT8, {"block_size": 0}),
    ):
        with pytest.raises(ConfigError):
            create_quantizer("dynamic", spec, site="x", options=options)
    with pytest.raises(PlanError, match="do not divide"):
        create_quantizer("dynamic", INT8, site="x", options={"scales": "block", "block_size": 3})(make_data(2, 8))
    for mode, quantizer in (("static", "dynamic"), ("dynamic", "lsq")):
        config = {"target": "ort", "mode": mode, "torch": {"activations": {"quantizer": quantizer}}, "rules": FORCED}
        with pytest.raises(ConfigError, match="computed at each run"):
            QuantModel(make_net(), config, example_inputs=make_data(2, 5, 64))


FORCED = [{"op": "linear", "set": {"quantize": True}}]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False)).eval()


def train(config: dict[str, Any]) -> tuple[QuantModel, Tensor]:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    model = observe(QuantModel(make_net(), config, example_inputs=x), x).init_qat()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.05))
    losses = [take_step(optimizer, (model(x) - x).square().mean()) for _ in range(6)]
    assert losses[-1] < losses[0]
    return model.freeze(), x


def test_mode_dynamic_exports_the_scales_of_each_run() -> None:
    config = {"target": "ort", "mode": "dynamic", "weights": {"bits": 4}, "rules": FORCED,
              "torch": {"weights": {"quantizer": "lsq"}}}  # fmt: skip
    model, x = train(config)
    done = to_onnx(model, x)
    assert [node.op_type for node in done.model.graph.node].count("DynamicQuantizeLinear") == 2
    for proto in (done.model, onnxq.apply(done.float_model, done.plan).model):
        found = next(iter(Session(proto).run({proto.graph.input[0].name: x.numpy()}).values()))
        np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(("quantizer", "bits"), [("uniform", 8), ("lsq", 4)])
def test_blocks_of_weights_are_trained_and_exported_for_matmulnbits(quantizer: str, bits: int) -> None:
    config = {
        "target": "ort",
        "mode": "weight-only",
        "weights": {"bits": bits, "granularity": "block", "block_size": 32},
        "activations": {"scheme": "symmetric", "signed": True},
        "torch": {
            "weights": {"quantizer": quantizer},
            "activations": {"quantizer": {"name": "dynamic", "scales": "block"}},
        },
    }
    model, x = train(config)
    data = [found for found in model.quantizers.values() if isinstance(found, Dynamic)]
    assert [found.site for found in data] == ["input:input", "1.out"]
    assert {found.options["block_size"] for found in data} == {32}
    done = to_onnx(model, x)
    assert [node.op_type for node in done.model.graph.node].count("DequantizeLinear") == 2
    assert not any("Dynamic" in node.op_type for node in done.model.graph.node)
    trained = model(x).detach().numpy()
    model.set_quant(activations=False)
    plain = model(x).detach().numpy()
    # As the file says; and as it may run, with data rounded in the same blocks (see docs/torch.md).
    found = next(iter(Session(done.model, optimize=False).run({done.model.graph.input[0].name: x.numpy()}).values()))
    np.testing.assert_allclose(found, plain, atol=1e-5)
    assert 0 < np.abs(trained - plain).max() < 0.05
