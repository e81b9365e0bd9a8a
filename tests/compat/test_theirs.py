"""What is handed on: modules and names of onnxruntime.quantization that are not here."""

import importlib
import pkgutil
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime import quantization

from onnxq import compat
from onnxq.compat import CompatWarning, QuantFormat, calibrate, qdq_loss_debug, quant_utils, quantize_static
from onnxq.compat.matmul_nbits_quantizer import (
    GPTQWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    RTNWeightOnlyQuantConfig,
)
from onnxq.errors import ConfigError
from tests.compat import scripts
from tests.networks import parse_text


def test_every_module_is_there() -> None:
    names = [name for _, name, _ in pkgutil.walk_packages(quantization.__path__, "onnxruntime.quantization.")]
    assert len(names) > 40
    for name in names:
        # Neural Compressor's own package imports what may not be there.
        if "neural_compressor" not in name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CompatWarning)
                importlib.import_module(name.replace("onnxruntime.quantization", "onnxq.compat"))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("onnxq.compat.nothing")


@pytest.mark.recent_ort
def test_names_are_the_very_ones() -> None:
    assert quant_utils.QuantType is quantization.QuantType
    assert calibrate.TensorsData is compat.TensorsData is quantization.TensorsData
    assert quant_utils.ms_domain == "com.microsoft"
    from onnxruntime.quantization.execution_providers.qnn import fusion_lpnorm

    from onnxq.compat.execution_providers.qnn.fusion_lpnorm import FusionLpNormalization

    assert FusionLpNormalization is fusion_lpnorm.FusionLpNormalization
    with pytest.raises(AttributeError, match="nothing"):
        _ = quant_utils.nothing


def test_a_class_that_quantizes_says_so() -> None:
    sys.modules.pop("onnxq.compat.qdq_quantizer", None)
    with pytest.warns(CompatWarning, match="qdq_quantizer is onnxruntime's own and quantizes as onnxruntime does"):
        assert compat.QDQQuantizer is quantization.QDQQuantizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The paths of a float model and a quantized one, and samples."""
    folder = tmp_path_factory.mktemp("debug")
    proto = scripts.make_net(scripts.CLASSIFIER)
    samples = [{"x": x} for x in scripts.make_inputs(proto, 4)]
    onnx.save(proto, folder / "f.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompatWarning)
        quantize_static(proto, folder / "q.onnx", samples, op_types_to_quantize=["Conv", "Gemm", "Add"])
    return folder / "f.onnx", folder / "q.onnx", samples


def test_weights(pair) -> None:
    matching = qdq_loss_debug.create_weight_matching(*map(str, pair[:2]))
    graph = onnx.load(pair[0]).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert matching.keys() == {
        name for node in graph.node if node.op_type in ("Conv", "Gemm") for name in node.input[1:]
    }
    for name, entry in matching.items():
        assert entry["float"].shape == stored[name].shape
        np.testing.assert_allclose(entry["dequantized"], entry["float"], atol=0.05 * np.abs(entry["float"]).max())
    assert all(20 < error < 300 for error in qdq_loss_debug.compute_weight_error(matching).values())


def test_activations(pair, tmp_path) -> None:
    seen = []
    for path in pair[:2]:
        qdq_loss_debug.modify_model_output_intermediate_tensors(str(path), tmp_path / "a.onnx")
        seen.append(qdq_loss_debug.collect_activations(str(tmp_path / "a.onnx"), iter(pair[2])))
    matching = qdq_loss_debug.create_activation_matching(seen[1], seen[0])
    assert sum("float" in entry for entry in matching.values()) > 1
    errors = qdq_loss_debug.compute_activation_error(matching)
    assert all(error["qdq_err"] > 25 and error.get("xmodel_err", 99) > 20 for error in errors.values())
    theirs = {"t_QuantizeLinear_Input": [1], "t": [2], "u": [3], "u_DequantizeLinear_Output": [4], "v_scale": [5]}
    assert qdq_loss_debug.create_activation_matching(theirs, {"t": [6]}) == {
        "t": {"pre_qdq": [1], "post_qdq": [2], "float": [6]}, "u": {"pre_qdq": [3], "post_qdq": [4]},
    }  # fmt: skip


# ---- MatMulNBitsQuantizer: every width and algorithm by name, in files that ONNX Runtime runs.

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


@pytest.mark.recent_ort
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
