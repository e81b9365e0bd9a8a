"""MatMulNBitsQuantizer: every width and algorithm by name, in files that ONNX Runtime runs."""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxq.compat import CompatWarning, QuantFormat
from onnxq.compat.matmul_nbits_quantizer import (
    GPTQWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    RTNWeightOnlyQuantConfig,
)
from onnxq.errors import ConfigError
from tests.networks import parse_text

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 96)).astype(np.float32)
QDQ, BLOCKS = QuantFormat.QDQ, {"block_size": 32}


def make_net() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    w0, w1 = ((rng.standard_normal(shape) * 0.3).astype(np.float32) for shape in ((96, 64), (64, 80)))
    text = "g (float[N,96] x) => (float[N,80] y) { [m0] a = MatMul(x, w0) [m1] y = MatMul(a, w1) }"
    return parse_text(text, opset=21, ir=10, w0=w0, w1=w1)


def run_quantizer(**how) -> tuple[list[tuple[str, dict[str, int]]], float, list[str]]:
    """Operators with their bits and blocks, SQNR in dB, and warnings."""
    proto = make_net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantizer = MatMulNBitsQuantizer(proto, **how)
        quantizer.process()
    done = quantizer.model.model
    kinds = [(node.op_type, {a.name: a.i for a in node.attribute if a.name in ("bits", "block_size")})
             for node in done.graph.node]  # fmt: skip
    right, near = (onnxruntime.InferenceSession(p.SerializeToString()).run(None, {"x": X})[0] for p in (proto, done))
    return kinds, 10 * np.log10(np.sum(right**2) / np.sum((near - right) ** 2)), [str(one.message) for one in caught]


@pytest.mark.parametrize(("how", "kind", "least"), [
    ({"bits": 2}, ("MatMulNBits", {"bits": 2, "block_size": 128}), 5),
    ({"bits": 4}, ("MatMulNBits", {"bits": 4, "block_size": 128}), 17),
    ({"bits": 8}, ("MatMulNBits", {"bits": 8, "block_size": 128}), 40),
    ({"is_symmetric": True, **BLOCKS}, ("MatMulNBits", {"bits": 4, "block_size": 32}), 18),
    ({"quant_format": QDQ, **BLOCKS}, ("DequantizeLinear", {"block_size": 32}), 18),
    ({"quant_format": QDQ, "channel_wised_quantize": True}, ("DequantizeLinear", {}), 15),
    ({"algo_config": RTNWeightOnlyQuantConfig(), **BLOCKS}, ("MatMulNBits", {"bits": 4, "block_size": 32}), 18),
    ({"algo_config": KQuantWeightOnlyQuantConfig(), **BLOCKS}, ("MatMulNBits", {"bits": 4, "block_size": 32}), 18),
    ({"algo_config": HQQWeightOnlyQuantConfig(32, 8)}, ("MatMulNBits", {"bits": 8, "block_size": 32}), 40),
])  # fmt: skip
def test_widths_and_algorithms(how, kind, least) -> None:
    kinds, sqnr, said = run_quantizer(**how)
    assert kinds.count(kind) == 2
    assert sqnr > least
    assert said == []


def test_gptq_rounds_by_samples() -> None:
    proto = make_net()
    # Samples in few directions, which rounding to nearest knows nothing of.
    basis = np.random.default_rng(2).standard_normal((8, 96))
    rows = [{"x": (np.random.default_rng(k).standard_normal((32, 8)) @ basis).astype(np.float32)} for k in range(8)]

    def judge(config) -> float:
        quantizer = MatMulNBitsQuantizer(proto, 4, 32, algo_config=config)
        quantizer.process()
        assert {node.op_type for node in quantizer.model.model.graph.node} == {"MatMulNBits"}
        right, near = (
            onnxruntime.InferenceSession(p.SerializeToString()).run(None, rows[0])[0]
            for p in (proto, quantizer.model.model)
        )
        return 10 * np.log10(np.sum(right**2) / np.sum((near - right) ** 2))

    assert judge(GPTQWeightOnlyQuantConfig(rows)) > judge(RTNWeightOnlyQuantConfig()) + 3
    with pytest.raises(ConfigError, match="is None, and GPTQ rounds by samples"):
        MatMulNBitsQuantizer(proto, algo_config=GPTQWeightOnlyQuantConfig()).process()


def test_nodes_have_their_own_and_stay_float() -> None:
    custom = RTNWeightOnlyQuantConfig(customized_weight_config={"m1": {"bits": 8}})
    kinds, _, said = run_quantizer(algo_config=custom, nodes_to_exclude=["m0", "m9"], **BLOCKS)
    assert kinds == [("MatMul", {}), ("MatMulNBits", {"bits": 8, "block_size": 32})]
    assert [text.split(" means")[0] for text in said] == ["nodes_to_exclude: 'm9'"]


def test_what_means_nothing_is_said_and_other_widths_are_refused() -> None:
    config = GPTQWeightOnlyQuantConfig([{"x": X}], percdamp=0.1, actorder=True)
    with pytest.warns(CompatWarning) as caught:
        MatMulNBitsQuantizer(make_net(), 4, 32, algo_config=config).process()
    assert [str(one.message).split(" means")[0] for one in caught] == ["percdamp", "actorder"]
    assert caught[0].filename == __file__
    with pytest.raises(ConfigError, match="bits: is 3"):
        MatMulNBitsQuantizer(make_net(), 3).process()
