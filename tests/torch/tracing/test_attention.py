"""torch's transformer modules in their traceable form: the same values, every product quantized."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from onnxq.evaluation.accumulator import measure_error
from onnxq.sites import Role
from tests.torch.nets import Encoder, Network, calibrate
from torch_frontend.quant_model import QuantModel
from torch_frontend.tracing.tracer import GraphOrigin

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"norm_first": True}, {"activation": "gelu"}, {"dropout": 0.1}, {"batch_first": False}]
)
def test_torchs_own_encoder_is_taken_apart_and_quantized(how: dict[str, Any], padded: bool) -> None:
    torch.manual_seed(0)
    net = Encoder(**how).eval()
    if not how.get("batch_first", True):
        net.position = nn.Parameter(net.position.detach()[:, None][:2])
        padded = False
    inputs = (TOKENS, PADDING) if padded else (TOKENS,)
    made = QuantModel(net, {"target": "virtual"}, example_inputs=inputs)
    torch.testing.assert_close(made(*inputs), net(*inputs), rtol=1e-5, atol=1e-5)
    assert {r.rule for r in made.refusals} <= {"softmax", "two-operands"}
    assert "encoder.layers.0.self_attn.in_proj_weight" in made.quantizers
    calibrate(made, inputs, asym=True).set_quant()
    assert measure_error(net(*inputs).detach().numpy(), made(*inputs).detach().numpy()).sqnr_db > 20
    made.init_qat()(*inputs).square().sum().backward()
    grads = {name: p.grad for name, p in made.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())


def test_cross_attention_reads_one_weight_in_three_parts() -> None:
    torch.manual_seed(0)
    net, q, kv = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    made = QuantModel(net, target="virtual", example_inputs=(q, kv, kv))
    for got, wanted in zip(made(q, kv, kv), net(q, kv, kv), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert [s for s, one in made.quantizers.items() if one.role is Role.WEIGHT] == ["in_proj_weight", "out_proj.weight"]


def test_encoder_and_decoder_together() -> None:
    torch.manual_seed(0)
    net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    given = {"src": torch.randn(2, 4, 8), "tgt": torch.randn(2, 5, 8), "tgt_mask": mask}
    made = QuantModel(net, target="virtual", example_inputs=given)
    torch.testing.assert_close(made(**given), net(**given), rtol=1e-5, atol=1e-5)
    place = "decoder.layers.0.self_attn"
    assert {(r.subject, r.rule) for r in made.refusals} == {
        (f"{place}.add", "two-operands"),
        (f"{place}.softmax", "softmax"),
    }
    made.prepare_calibration()
    made(**given)
    made.calc_qparams().set_quant()
    assert measure_error(net(**given).detach().numpy(), made(**given).detach().numpy()).sqnr_db > 20


def test_attention_with_learned_extra_keys_is_captured_by_a_run() -> None:
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    net, x = Network(lambda m, x: m.attention(x, x, x)[0], attention=attention).eval(), torch.randn(2, 3, 8)
    made = QuantModel(net, target="virtual", example_inputs=x)
    assert made.origin is GraphOrigin.EXPORTED
    assert [(r.subject, r.rule) for r in made.refusals] == [("Network", "mode")]
    assert {"attention.in_proj_weight", "attention.out_proj.weight"} <= set(made.quantizers)
    torch.testing.assert_close(made(x), net(x))
    alone = QuantModel(net, target="virtual")
    assert [r.subject for r in alone.refusals] == ["attention"]
    assert torch.equal(alone(x), net(x))
