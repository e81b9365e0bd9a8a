"""An exported model has the same outputs in ONNX Runtime as the QuantModel in torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnxq.sites import Role
from tests.cpus.kernels import cpu_saturates
from tests.torch import exporting
from tests.torch.exporting import Depthwise, Encoder, Residual
from torch_frontend.export import Exported, to_onnx
from torch_frontend.quant_model import Follower, QuantModel


# Both granularities with every width and on every network, each with two widths.
@pytest.mark.parametrize(("net", "grain", "bits"), [
    (Residual, "tensor", 2), (Residual, "channel", 8), (Depthwise, "channel", 2), (Depthwise, "tensor", 4),
    (Encoder, "channel", 4), (Encoder, "tensor", 8),
])  # fmt: skip
def test_every_level_is_the_same(net: type, grain: str, bits: int) -> None:
    model, x = exporting.quantized(net, exporting.wish(bits, grain))
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    exported = to_onnx(model, x, optimize=bits != 4, dynamic_batch=bits == 8)
    exporting.assert_same(model, exported, x)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any("marked" in name for name, _ in model.named_buffers())
    weights = [site.spec for site in exported.plan.sites if site.role is Role.WEIGHT]
    assert {spec.storage for spec in weights} == {"int8" if bits == 8 else "int4"}
    assert {site.spec.bits for site in exported.plan.sites} == {bits}
    # No engine's limits are this target's, so its weights may overflow what some CPUs add up in 16 bits.
    if bits < 8 or not cpu_saturates():
        assert_close_when_optimized(model, exported, x)


def assert_close_when_optimized(model: QuantModel, exported: Exported, x: torch.Tensor) -> None:
    """Integer kernels round biases and sums, which moves outputs by less than two steps."""
    wanted, _ = exporting.torch_run(model, x)
    fast = next(iter(exporting.ort_run(exported.model, x, [], optimize=True).values()))
    np.testing.assert_allclose(fast, wanted, atol=2 * exporting.step_at_outputs(model))


# Of convolutions: tests/torch/quant_model/test_sums.py. All kinds of quantizers: tests/torch/test_matrix.py.
def test_onnx_runtime_s_own_placement() -> None:
    model, x = exporting.quantized(Encoder, exporting.wish(8, "channel", "ort"))
    assert model.traced
    exported = to_onnx(model, x)
    exporting.assert_same(model, exported, x)
    assert_close_when_optimized(model, exported, x)


def test_inputs_that_share_numbers_are_sites_of_their_own() -> None:
    model, x = exporting.quantized(
        Residual, exporting.wish(8, "channel", multi_input={"add": "share", "cat": {"follow": 0}})
    )
    followers = [q.site for q in model.quantizers.values() if isinstance(q, Follower) and q.active]
    assert followers
    exported = to_onnx(model, x)
    assert set(followers) <= set(exported.sites)
    exporting.assert_same(model, exported, x)


def test_blocks() -> None:
    config = exporting.wish(4, "block")
    config["weights"]["block_size"] = 4
    model, x = exporting.quantized(Encoder, config)
    exported = to_onnx(model, x)
    assert exported.plan.opset == 21
    exporting.assert_same(model, exported, x)


@pytest.mark.recent_ort
def test_half_precision_computes_on_the_same_levels() -> None:
    model, x = exporting.quantized(Depthwise, exporting.wish(8, "channel"))
    model.half()
    exported = to_onnx(model, x.half())
    assert {t.data_type for t in exported.model.graph.initializer} & {10}
    wanted, seen = exporting.torch_run(model, x.half())
    assert wanted.dtype == np.float16
    outputs = exporting.ort_run(exported.model, x.half(), ["x/dequantized"])
    found = outputs[exported.model.graph.output[0].name]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, wanted, atol=exporting.step_at_outputs(model))
    np.testing.assert_array_equal(outputs["x/dequantized"], seen["input:x"][0])
