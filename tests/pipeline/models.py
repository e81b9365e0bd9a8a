"""Small float models shared by the pipeline's tests, and what is asked of every result."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader

import onnxq
from onnxq.config import Config, Rule
from tests.networks import parse_text


def add_rule(config: Config, **rule: Any) -> Config:
    """The configuration with this rule before its own."""
    return config.model_copy(update={"rules": (Rule(**rule), *config.rules)})


EVERYTHING = add_rule(Config(effort="fast"), op="*", set={"quantize": True})
BALANCED = EVERYTHING.model_copy(update={"effort": "balanced"})
# One activation of `residual` with two bits, the others with eight: what is to be found.
ROUGH = add_rule(EVERYTHING, tensor="r", role="activation", set={"quantize": True, "bits": 2})

RESIDUAL = """g (float[N,32,8,8] x) => (float[N,10] y) {
    a = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(a) c = Conv <pads=[1,1,1,1]>(r, w1, b1)
    d = Conv <pads=[1,1,1,1]>(r, w2, b2) s = Add(c, d) t = Relu(s) m = GlobalAveragePool(t) f = Flatten(m)
    y = Gemm <transB=1>(f, w3, b3)
}"""


# Without a product of matrices.
HEADLESS = RESIDUAL.replace("float[N,10]", "float[N,32]").replace(
    " f = Flatten(m)\n    y = Gemm <transB=1>(f, w3, b3)", " y = Flatten(m)"
)


def residual(seed: int = 0, opset: int = 17, text: str = RESIDUAL) -> onnx.ModelProto:
    """A small residual CNN, 32 channels at 8x8, ten classes; nodes unnamed."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for k in range(3):
        arrays[f"w{k}"] = rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17
        arrays[f"b{k}"] = rng.standard_normal(32).astype(np.float32) / 8
    arrays["w3"], arrays["b3"] = (rng.standard_normal(shape).astype(np.float32) for shape in ((10, 32), 10))
    proto = parse_text(text, opset=opset, **arrays)
    onnx.checker.check_model(proto)
    return proto


def images(count: int = 16, seed: int = 1) -> dict[str, np.ndarray]:
    """Samples for `residual`."""
    return {"x": np.random.default_rng(seed).standard_normal((count, 32, 8, 8)).astype(np.float32)}


class Reader(CalibrationDataReader):
    """Samples of an input x for onnxruntime's own quantizer."""

    def __init__(self, samples: np.ndarray) -> None:
        self.rest = iter([{"x": sample[None]} for sample in samples])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.rest, None)


def narrowed(proto: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """The model as a float16 or bfloat16 export has it."""
    out = onnx.ModelProto.FromString(proto.SerializeToString())
    for tensor in out.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            value = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    for value in (*out.graph.input, *out.graph.output):
        value.type.tensor_type.elem_type = kind
    return out


def quantize(proto: Any, data: Any = None, config: Config | str = EVERYTHING, **overrides: Any) -> onnxq.Result:
    """The model quantized, every operator unless the configuration says otherwise; no latency is measured."""
    return onnxq.quantize(proto, data, config, overrides={"latency": False, **overrides})


def to_bytes(result: onnxq.Result) -> bytes:
    """The file that the result would be written as."""
    return result.model.SerializeToString(deterministic=True)


def find_worst_db(result: onnxq.Result) -> float:
    """The SQNR of the output that is farthest from float, as the file says."""
    return min(check.sqnr_db[0] for check in result.report.checks)


def list_accounts(result: onnxq.Result, name: str) -> list[str]:
    """The lines of the pass of this name in the summary."""
    return [line for line in result.report.accounts if line.startswith(f"{name}: ")]


def assert_faithful(result: onnxq.Result, least: float = 25.0, agreement: float = 35.0) -> None:
    """The answers are the float model's, and ORT's optimizations change nothing. least, agreement: in dB."""
    assert result.report.checks
    for check in result.report.checks:
        assert min(check.sqnr_db) > least, check
        assert check.agreement_db > agreement, check
