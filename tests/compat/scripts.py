"""Scripts as people write them for onnxruntime.quantization, small nets and their data; PACKAGE is what they import."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from tests.networks import add_arrays, parse_text

READER = """
import os
import numpy
import onnxruntime
from PACKAGE import CalibrationDataReader

class FolderReader(CalibrationDataReader):
    def __init__(self, folder, model_path):
        self.folder = folder
        self.input_name = onnxruntime.InferenceSession(model_path, None).get_inputs()[0].name
        self.enum_data = None

    def get_next(self):
        if self.enum_data is None:
            self.enum_data = iter(sorted(os.listdir(self.folder)))
        name = next(self.enum_data, None)
        return None if name is None else {self.input_name: numpy.load(os.path.join(self.folder, name))}

    def rewind(self):
        self.enum_data = None
"""

# An image classifier, with a reader that opens one file after the other.
IMAGES = (
    READER
    + """
from PACKAGE import QuantFormat, QuantType, quantize_static

reader = FolderReader("images", "model.onnx")
quantize_static(
    "model.onnx", "out.onnx", reader, quant_format=QuantFormat.from_string("QDQ"), per_channel=False,
    weight_type=QuantType.QInt8,
)
"""
)

# The same after preprocessing, with lists of nodes and operators, and ranges without the rarest values.
EXCLUDING = (
    READER
    + """
import onnx
from PACKAGE import CalibrationMethod, QuantType, quantize_static
from PACKAGE.shape_inference import quant_pre_process

quant_pre_process("model.onnx", "infer.onnx", skip_symbolic_shape=True)
second = [node.name for node in onnx.load("model.onnx").graph.node if node.op_type == "Conv"][1]
quantize_static(
    model_input="infer.onnx",
    model_output="out.onnx",
    calibration_data_reader=FolderReader("images", "infer.onnx"),
    op_types_to_quantize=["Conv", "MatMul", "Add"],
    nodes_to_exclude=[second],
    per_channel=True,
    activation_type=QuantType.QUInt8,
    weight_type=QuantType.QInt8,
    calibrate_method=CalibrationMethod.Percentile,
    extra_options={"CalibPercentile": 99.99, "WeightSymmetric": True, "QuantizeBias": True},
)
"""
)

# By a configuration, with a function that picks the nodes to leave.
CONFIGURED = (
    READER
    + """
from PACKAGE import CalibrationMethod, QuantType, get_qdq_config, quantize
from PACKAGE.calibrate import CalibrationMethod as SameMethod
from PACKAGE.quant_utils import QuantFormat

config = get_qdq_config(
    "model.onnx", FolderReader("images", "model.onnx"), calibrate_method=CalibrationMethod.MinMax,
    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, per_channel=True,
    calibrate_args={"moving_average": True},
    nodes_to_exclude=lambda model, node: node.op_type == "Gemm",
)
quantize("model.onnx", "out.onnx", config)
"""
)

# For Snapdragon's NPU, with a wide result.
NPU = (
    READER
    + """
from PACKAGE import QuantType, quantize
from PACKAGE.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

changed = qnn_preprocess_model("model.onnx", "pre.onnx", fuse_layernorm=True)
source = "pre.onnx" if changed else "model.onnx"
config = get_qnn_qdq_config(
    source, FolderReader("images", source), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    per_channel=True, init_overrides={"y": [{"quant_type": QuantType.QUInt16}]},
)
quantize(source, "out.onnx", config)
"""
)

# A transformer, without data.
TRANSFORMER = """
from PACKAGE import QuantType, quantize_dynamic

quantize_dynamic(
    "model.onnx", "out.onnx", op_types_to_quantize=["MatMul", "Attention"], weight_type=QuantType.QInt8,
    nodes_to_exclude=["MatMul_3"], extra_options={"MatMulConstBOnly": True},
)
"""

CLASSIFIER = """g (float[1,32,8,8] x) => (float[1,10] y) {
    c = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(c) d = Conv <pads=[1,1,1,1]>(r, w1, b1) s = Add(d, r) t = Relu(s)
    p = GlobalAveragePool(t) f = Flatten(p) y = Gemm(f, w2, b2)
}"""
ENCODER = """g (float[1,32,128] x) => (float[1,32,128] y) {
    h = MatMul(x, w0) i = Add(h, b0) j = Relu(i) k = MatMul(j, w1) l = Add(k, b1) y = Add(l, x)
}"""
# Convolutions whose results are quantized at once.
CHAIN = """g (float[1,32,8,8] x) => (float[1,32,8,8] y) {
    c = Conv <pads=[1,1,1,1]>(x, w0, b0) y = Conv <pads=[1,1,1,1]>(c, w1, b1)
}"""
SHAPES = {
    CHAIN: {"w0": (32, 32, 3, 3), "b0": (32,), "w1": (32, 32, 3, 3), "b1": (32,)},
    CLASSIFIER: {"w0": (32, 32, 3, 3), "b0": (32,), "w1": (32, 32, 3, 3), "b1": (32,), "w2": (32, 10), "b2": (10,)},
    ENCODER: {"w0": (128, 512), "b0": (512,), "w1": (512, 128), "b1": (128,)},
}


def make_net(body: str) -> onnx.ModelProto:
    """A net of one seed, every node named after its operator and place; channels of the weights differ in size."""
    rng, proto = np.random.default_rng(0), parse_text(body)
    for name, shape in SHAPES[body].items():
        value = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) if len(shape) > 2 else shape[0])
        if len(shape) > 2:
            value *= np.exp(rng.uniform(-2, 1, (shape[0], 1, 1, 1)))
        add_arrays(proto.graph, **{name: value.astype(np.float32)})
    for k, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{k}"
    return proto


def make_inputs(proto: onnx.ModelProto, count: int, seed: int = 1) -> list[np.ndarray]:
    """Inputs of the net."""
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    return list(np.random.default_rng(seed).standard_normal((count, *shape)).astype(np.float32))


def prepare_folder(folder: Path, body: str) -> None:
    """The files that scripts take as there: model.onnx and images/*.npy."""
    proto = make_net(body)
    onnx.save(proto, folder / "model.onnx")
    (folder / "images").mkdir()
    for k, array in enumerate(make_inputs(proto, 12)):
        np.save(folder / "images" / f"{k:02}.npy", array)


def measure_sqnr(float_model: Path, model: Path) -> float:
    """SQNR of the output in dB, on inputs that nothing was calibrated with."""
    inputs = make_inputs(onnx.load(float_model), 16, seed=2)
    one, other = (
        np.stack([session.run(None, {"x": x})[0] for x in inputs])
        for session in (onnxruntime.InferenceSession(str(path)) for path in (float_model, model))
    )
    return float(10 * np.log10(np.sum(one**2) / np.sum((one - other) ** 2)))
