"""The operators that quantization knows, whichever module, function or method calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator.

    name: its name in `torch.multi_input` and rules. onnx: op types it becomes, so that rules written for ONNX hold too.
    data: names of the arguments that carry activations. weight: the argument or attribute with the weight;
    weight_axis: its output-channel axis; block_axis: the axis of blocks. channel: the channel axis of activations.
    moves: results are values of the input, all or some, so that they need no quantization of their own.
    refused: (reason, fix) where it always stays float and computes enough to matter.
    """

    name: str
    onnx: tuple[str, ...] = ()
    data: tuple[str, ...] = ("input",)
    weight: str | None = None
    weight_axis: int = 0
    block_axis: int = 1
    channel: int = 1
    moves: bool = False
    refused: tuple[str, str] | None = None


_PAIR = ("input", "other")
# The state inside torch's recurrent layers is out of reach of a quantizer.
_RECURRENT = ("a recurrent layer keeps its state inside: it stays float", "unroll it from Linear layers to quantize it")

_OPS = (
    Op(name="conv", onnx=("Conv",), weight="weight"),
    Op(name="conv_transpose", onnx=("ConvTranspose",), weight="weight", weight_axis=1, block_axis=0),
    Op(name="linear", onnx=("Gemm", "MatMul"), weight="weight", channel=-1),
    Op(name="bilinear", onnx=("Einsum",), data=("input1", "input2"), weight="weight", channel=-1),
    # Its input are indices, which are no activations.
    Op(name="embedding", onnx=("Gather",), data=(), weight="weight"),
    # The weight is an operand only where that is a parameter; its axes are counted from the end for batched products.
    Op(name="matmul", onnx=("MatMul",), data=_PAIR, weight_axis=-1, block_axis=-2, channel=-1),
    Op(name="attention", onnx=("Attention", "MatMul"), data=("query", "key", "value"), channel=-1),
    Op(name="add", onnx=("Add",), data=_PAIR),
    Op(name="sub", onnx=("Sub",), data=_PAIR),
    Op(name="mul", onnx=("Mul",), data=_PAIR),
    Op(name="div", onnx=("Div",), data=_PAIR),
    Op(name="cat", onnx=("Concat",), data=("tensors",), moves=True),
    Op(name="stack", onnx=("Concat",), data=("tensors",), moves=True),
    Op(name="where", onnx=("Where",), data=_PAIR, moves=True),
    Op(name="masked_fill", onnx=("Where",)),
    # Activations.
    Op(name="relu", onnx=("Relu",)),
    Op(name="relu6", onnx=("Clip",)),
    Op(name="clamp", onnx=("Clip",)),
    Op(name="leaky_relu", onnx=("LeakyRelu",)),
    Op(name="prelu", onnx=("PRelu",)),
    Op(name="elu", onnx=("Elu",)),
    Op(name="sigmoid", onnx=("Sigmoid",)),
    Op(name="silu", onnx=("Mul",)),
    Op(name="gelu", onnx=("Gelu",)),
    Op(name="mish", onnx=("Mish",)),
    Op(name="hardsigmoid", onnx=("HardSigmoid",)),
    Op(name="hardswish", onnx=("HardSwish",)),
    Op(name="tanh", onnx=("Tanh",)),
    Op(name="softplus", onnx=("Softplus",)),
    Op(name="softmax", onnx=("Softmax",)),
    Op(name="log_softmax", onnx=("LogSoftmax",)),
    Op(name="glu", onnx=("Mul",)),
    # Normalizations and reductions.
    Op(name="batch_norm", onnx=("BatchNormalization",)),
    Op(name="group_norm", onnx=("GroupNormalization",)),
    Op(name="instance_norm", onnx=("InstanceNormalization",)),
    Op(name="layer_norm", onnx=("LayerNormalization",), channel=-1),
    Op(name="rms_norm", onnx=("RMSNormalization",), channel=-1),
    Op(name="avg_pool", onnx=("AveragePool",)),
    Op(name="adaptive_avg_pool", onnx=("GlobalAveragePool",)),
    Op(name="max_pool", onnx=("MaxPool",), moves=True),
    Op(name="adaptive_max_pool", onnx=("GlobalMaxPool",), moves=True),
    Op(name="mean", onnx=("ReduceMean",)),
    Op(name="sum", onnx=("ReduceSum",)),
    Op(name="interpolate", onnx=("Resize",)),
    # Data movement.
    Op(name="pad", onnx=("Pad",), moves=True),
    Op(name="split", onnx=("Split",), moves=True),
    Op(name="slice", onnx=("Slice", "Gather"), moves=True),
    Op(name="reshape", onnx=("Reshape", "Flatten", "Squeeze", "Unsqueeze"), moves=True),
    Op(name="transpose", onnx=("Transpose", "DepthToSpace", "SpaceToDepth"), moves=True),
    Op(name="expand", onnx=("Expand", "Tile"), moves=True),
    Op(name="identity", onnx=("Identity", "Dropout"), moves=True),
    Op(name="cast", onnx=("Cast",)),
    # All functions that are known and stay float.
    Op(name="float"),
    Op(name="lstm", onnx=("LSTM",), refused=_RECURRENT),
    Op(name="gru", onnx=("GRU",), refused=_RECURRENT),
    Op(name="rnn", onnx=("RNN",), refused=_RECURRENT),
    Op(
        name="multihead_attention",
        onnx=("Attention",),
        data=("query", "key", "value"),
        channel=-1,
        refused=(
            "is called with padding masks or in a way that its products cannot be taken apart",
            "write it with Linear layers and F.scaled_dot_product_attention",
        ),
    ),
)

OPS = {op.name: op for op in _OPS}
