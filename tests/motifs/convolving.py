"""Convolutions and pools in their odd forms, and the ways in which their weights come."""

import numpy as np

from tests.motifs.net import FLOAT, INT64, MAP, NEWEST, Input, Motif, Net, Value, floats, ints, named


def dilated(net: Net, x: Value) -> Value:
    weight = net.weight(8, x.shape[0], 3, 3)
    name = net.op("Conv", x, weight, dilations=[2, 3], pads=[2, 3, 2, 3])
    return Value(net.op("LeakyRelu", name, alpha=0.1), (8, *x.shape[1:]))


def asymmetric_pads(net: Net, x: Value) -> Value:
    weight = net.weight(8, x.shape[0], 2, 3)
    return Value(net.op("Conv", x, weight, net.around(8), pads=[1, 2, 0, 0]), (8, *x.shape[1:]))


def auto_pads(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    upper = net.op("Conv", x, net.weight(8, channels, 2, 4), auto_pad="SAME_UPPER")
    lower = net.op("Conv", upper, net.weight(8, 8, 4, 2), auto_pad="SAME_LOWER")
    return Value(net.op("Conv", lower, net.weight(8, 8, 1, 1), auto_pad="VALID"), (8, height, width))


def padded_conv(net: Net, x: Value, *pads: Input, **attributes: object) -> Value:
    """A valid convolution behind a Pad of one pixel each way."""
    pad = net.op("Pad", x, *pads, **attributes)
    return Value(net.op("Conv", pad, net.weight(8, x.shape[0], 3, 3)), (8, *x.shape[1:]))


constant_pad = named("constant_pad", padded_conv, ints(0, 0, 1, 1, 0, 0, 1, 1), floats(0.5).reshape(()))
edge_pad = named("edge_pad", padded_conv, ints(0, 0, 1, 1, 0, 0, 1, 1), mode="edge")
edge_pad_of_axes = named("edge_pad_of_axes", padded_conv, ints(1, 1, 1, 1), "", ints(-1, -2), mode="edge")
wrap_pad = named("wrap_pad", padded_conv, ints(0, 0, 1, 1, 0, 0, 1, 1), mode="wrap")


def reflect_pad_of_axes(net: Net, x: Value) -> Value:
    both = net.op("Concat", x, x, axis=2)
    wide = net.op("Concat", both, both, axis=3)
    name = net.op("Pad", wide, ints(1, 1, 1, 1), "", ints(2, 3), mode="reflect")
    weight = net.weight(8, x.shape[0], 4, 4)
    conv = net.op("Conv", name, weight, strides=[2, 2])
    return Value(conv, (8, *x.shape[1:]))


def pads_as_input(net: Net, x: Value) -> Value:
    pads = net.feed(INT64, [8], lambda rng: ints(0, 0, 1, 1, 0, 0, 1, 1))
    return padded_conv(net, x, pads)


def pads_to_a_multiple(net: Net, x: Value) -> Value:
    """As window attention pads: by the remainder of the shape, which is cut off again behind."""
    height = net.dims(x, 2, 3)
    rest = net.op("Mod", net.op("Sub", ints(3), net.op("Mod", height, ints(3))), ints(3))
    pads = net.op("Concat", ints(0, 0, 0, 0, 0, 0), rest, ints(0), axis=0)
    wide = net.op("Pad", x, pads)
    conv = net.op("Conv", wide, net.weight(8, x.shape[0], 3, 1), pads=[1, 0, 1, 0])
    return Value(net.op("Slice", conv, ints(0), height, ints(2)), (8, *x.shape[1:]))


def negative_pad(net: Net, x: Value) -> Value:
    wide = net.op("Conv", x, net.weight(8, x.shape[0], 1, 1), pads=[1, 1, 1, 1])
    return Value(net.op("Pad", wide, ints(0, 0, -1, -1, 0, 0, -1, -1)), (8, *x.shape[1:]))


def causal_conv(net: Net, x: Value) -> Value:
    """A convolution over one axis with its pads on one side, its gate and its residual."""
    channels, height, width = x.shape
    flat = net.op("Reshape", x, ints(0, channels, height * width))
    conv = net.op("Conv", flat, net.weight(2 * channels, channels, 3), pads=[4, 0], dilations=[2])
    left, right = net.ops("Split", 2, conv, ints(channels, channels), axis=1)
    gated = net.op("Mul", net.op("Tanh", left), net.op("Sigmoid", right))
    return Value(net.op("Reshape", net.op("Add", gated, flat), ints(0, *x.shape)), x.shape)


def conv3d(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    deep = net.op("Reshape", x, ints(0, channels, 1, height, width))
    both = net.op("Concat", deep, deep, axis=2)
    conv = net.op("Conv", both, net.weight(6, channels, 2, 3, 3), pads=[0, 1, 1, 0, 1, 1])
    return Value(net.op("Reshape", conv, ints(0, 6, height, width)), (6, height, width))


def depthwise(net: Net, x: Value) -> Value:
    channels = x.shape[0]
    name = net.op("Conv", x, net.weight(2 * channels, 1, 3, 3), group=channels, pads=[1, 1, 1, 1])
    clipped = net.op("Clip", name, floats(0).reshape(()), floats(6).reshape(()))
    return net.conv(Value(clipped, (2 * channels, *x.shape[1:])), 8)


def channel_shuffle(net: Net, x: Value) -> Value:
    x = net.conv(x, 8)
    _, height, width = x.shape
    name = net.op("Conv", x, net.weight(8, 4, 3, 3), group=2, pads=[1, 1, 1, 1])
    split = net.op("Reshape", name, ints(0, 2, 4, height, width))
    mixed = net.op("Transpose", split, perm=[0, 2, 1, 3, 4])
    return Value(net.op("Reshape", mixed, ints(0, 8, height, width)), x.shape)


def standardized_weight(net: Net, x: Value) -> Value:
    """The weight's mean is taken off in the graph."""
    weight = net.name(net.weight(8, x.shape[0], 3, 3))
    centered = net.op("Sub", weight, net.reduce("ReduceMean", weight, 1, 2, 3))
    return Value(net.op("Conv", x, centered, pads=[1, 1, 1, 1]), (8, *x.shape[1:]))


def predicted_weight(net: Net, x: Value) -> Value:
    """A dynamic filter: the weight comes of the activations, which takes a batch of one."""
    channels = x.shape[0]
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    mean = net.reduce("ReduceMean", pooled, 0)
    weight = net.op("Reshape", net.op("MatMul", mean, net.weight(channels, 4 * channels, fan=channels)),
                    ints(4, channels, 1, 1))  # fmt: skip
    return Value(net.op("Conv", x, weight), (4, *x.shape[1:]))


def shared_weight(net: Net, x: Value) -> Value:
    """Two heads with one weight and two biases."""
    weight = net.name(net.weight(8, x.shape[0], 3, 3))
    sides = [net.op("Conv", x, weight, net.around(8), pads=[k, k, k, k], dilations=[k, k]) for k in (1, 2)]
    return Value(net.op("Max", *sides), (8, *x.shape[1:]))


def batch_norm_behind_relu(net: Net, x: Value) -> Value:
    """Nothing in front of it that it can be folded into."""
    channels = x.shape[0]
    values = [net.around(channels, center) for center in (1, 0, 0)]
    variance = np.abs(net.around(channels, 1.0)) + np.float32(0.1)
    return Value(net.op("BatchNormalization", net.op("Relu", x), *values, variance), x.shape)


def pools(net: Net, x: Value) -> Value:
    """Averages with and without their pads, maxima, rounded up and of dilated windows."""
    common = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    some = [net.op("AveragePool", x, **common), net.op("AveragePool", x, count_include_pad=1, **common)]
    some.append(net.op("MaxPool", x, kernel_shape=[2, 2], pads=[1, 1, 1, 1], dilations=[2, 2]))
    return Value(net.op("Concat", *some, axis=1), (3 * x.shape[0], *x.shape[1:]))


def ceil_pool(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    name = net.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    return Value(name, (channels, (height + 1) // 2, (width + 1) // 2))


def dilated_average(net: Net, x: Value) -> Value:
    name = net.op("AveragePool", x, kernel_shape=[3, 3], pads=[2, 2, 2, 2], dilations=[2, 2])
    return Value(name, x.shape)


def dilated_pools(net: Net, x: Value) -> Value:
    """Dilated windows that stride, round up and count their pads."""
    channels, height, width = x.shape
    common = {"kernel_shape": [2, 3], "pads": [1, 2, 1, 2], "dilations": [2, 2], "strides": [2, 1], "ceil_mode": 1}
    kinds = ("AveragePool", "MaxPool") + ("LpPool",) * (net.opset >= 18)
    some = [net.op(kind, x, **common) for kind in kinds]
    some.append(net.op("AveragePool", x, count_include_pad=1, **common))
    shape = ((height + 1) // 2, width)
    # (height - 1) / 2 + 1, rounded up
    return net.conv(Value(net.op("Concat", *some, axis=1), (len(some) * channels, *shape)), channels)


def global_pools(net: Net, x: Value) -> Value:
    """Three ways to one pixel, which gate the map together."""
    gates = [net.conv(Value(net.op(kind, x), (x.shape[0], 1, 1)), x.shape[0]).name
             for kind in ("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")]  # fmt: skip
    return Value(net.op("Mul", x, net.op("Sigmoid", net.op("Sum", *gates))), x.shape)


def lp_pool(net: Net, x: Value) -> Value:
    name = net.op("LpPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], p=2)
    return Value(name, x.shape)


def max_unpool(net: Net, x: Value) -> Value:
    """SegNet: the maxima go back to where they were."""
    both = net.op("Resize", x, "", floats(1, 1, 2, 2), mode="linear")
    pooled, indices = net.ops("MaxPool", 2, both, kernel_shape=[2, 2], strides=[2, 2])
    conv = net.conv(Value(pooled, x.shape), x.shape[0])
    shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2])
    return Value(net.op("MaxUnpool", conv, indices, kernel_shape=[2, 2], strides=[2, 2]), shape)


def squeeze_excite(net: Net, x: Value) -> Value:
    channels = x.shape[0]
    pooled = net.op("GlobalAveragePool", x)
    small = net.op("Relu", net.conv(Value(pooled, (channels, 1, 1)), 4))
    gate = net.op("HardSigmoid", net.conv(Value(small, (4, 1, 1)), channels), alpha=1 / 6, beta=0.5)
    return Value(net.op("Mul", x, gate), x.shape)


def block_attention(net: Net, x: Value) -> Value:
    """CBAM: a gate of each pixel from the mean and maximum over channels."""
    stats = net.op("Concat", net.reduce("ReduceMean", x, 1), net.reduce("ReduceMax", x, 1), axis=1)
    gate = net.op("Sigmoid", net.conv(Value(stats, (2, *x.shape[1:])), 1, 3))
    return Value(net.op("Mul", x, gate), x.shape)


def residuals(net: Net, x: Value) -> Value:
    """Two blocks on one stem, which is an output too."""
    for _ in range(2):
        inner = net.conv(Value(net.op("Relu", x), x.shape), x.shape[0], 3)
        x = Value(net.op("Add", x, net.conv(inner, x.shape[0])), x.shape)
    net.give(x.name)
    return x


def deformable(net: Net, x: Value) -> Value:
    """A convolution whose taps are moved by offsets that the network predicts."""
    offsets = net.op("Tanh", net.conv(x, 18, 3))
    mask = net.op("Sigmoid", net.conv(x, 9))
    weight = net.weight(8, x.shape[0], 3, 3)
    return Value(net.op("DeformConv", x, weight, offsets, net.around(8), mask, pads=[1, 1, 1, 1]), (8, *x.shape[1:]))


def causal_conv_with_state(net: Net, x: Value) -> Value:
    """A state space model's convolution: the last values of the past are an input, those of now an output."""
    channels, height, width = x.shape
    flat = net.op("Reshape", x, ints(0, channels, height * width))
    past = net.feed(FLOAT, ["N", channels, 2], lambda rng: rng.standard_normal((1, channels, 2)).astype("f4"))
    conv, state = net.ops(
        "CausalConvWithState", 2, flat, net.weight(channels, 1, 3), net.around(channels), past, activation="silu"
    )
    net.give(state)
    return Value(net.op("Reshape", conv, ints(0, *x.shape)), x.shape)


def weight_as_input(net: Net, x: Value) -> Value:
    weight = net.weight(4, x.shape[0], 1, 1)
    name = net.feed(FLOAT, list(weight.shape), lambda rng: weight)
    return Value(net.op("Conv", x, name), (4, *x.shape[1:]))


MOTIFS = (
    *(Motif(build, MAP) for build in (
        dilated, asymmetric_pads, auto_pads, constant_pad, edge_pad, negative_pad, causal_conv, conv3d, depthwise,
        channel_shuffle, standardized_weight, predicted_weight, shared_weight, batch_norm_behind_relu, lp_pool,
        squeeze_excite, block_attention, residuals, weight_as_input,
    )),
    Motif(max_unpool, MAP, 9), Motif(pools, MAP, 10), Motif(ceil_pool, MAP, 10),
    Motif(pads_as_input, MAP, 11), Motif(pads_to_a_multiple, MAP, 11),
    Motif(reflect_pad_of_axes, MAP, 18), Motif(edge_pad_of_axes, MAP, 18), Motif(wrap_pad, MAP, 19),
    Motif(dilated_average, MAP, 19), Motif(dilated_pools, MAP, 19), Motif(global_pools, MAP, 7, 21),
    # ONNX Runtime 1.23 has no kernel for DeformConv.
    Motif(deformable, MAP, 19 if NEWEST > 22 else NEWEST + 1), Motif(causal_conv_with_state, MAP, 27),
)  # fmt: skip
