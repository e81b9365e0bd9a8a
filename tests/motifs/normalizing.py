"""Normalizations as operators and written out, with and without scale."""

import numpy as np

from tests.motifs.net import MAP, TOKENS, Motif, Net, Value, floats, ints, named


def normalized(net: Net, x: Value, kind: str, *centers: float, learned: bool = True, **attributes: object) -> Value:
    """An operator with a scale around 1 and a bias around 0 for each channel. learned: else exactly those."""
    channels = x.shape[0 if len(x.shape) == MAP else -1]
    values = [net.around(channels, center) if learned else np.full(channels, center, "f4") for center in centers]
    return Value(net.op(kind, x, *values, **attributes), x.shape)


instance_norm = named("instance_norm", normalized, "InstanceNormalization", 1, 0)
instance_norm_plain = named("instance_norm_plain", normalized, "InstanceNormalization", 1, 0, learned=False)
group_norm_of_ones = named("group_norm_of_ones", normalized, "GroupNormalization", 1, 0, learned=False, num_groups=2)
layer_norm = named("layer_norm", normalized, "LayerNormalization", 1, 0, axis=-1)
layer_norm_without_bias = named("layer_norm_without_bias", normalized, "LayerNormalization", 1, epsilon=1e-3)
layer_norm_of_ones = named("layer_norm_of_ones", normalized, "LayerNormalization", 1, learned=False)
rms_norm = named("rms_norm", normalized, "RMSNormalization", 1)
rms_norm_of_ones = named("rms_norm_of_ones", normalized, "RMSNormalization", 1, learned=False, epsilon=1e-6)
mean_variance = named("mean_variance", normalized, "MeanVarianceNormalization", axes=[0, 2, 3])
local_response = named("local_response", normalized, "LRN", size=3, alpha=0.01)


def grouped(net: Net, x: Value, groups: int) -> str:
    """GroupNorm without scale, as torch exports it: an InstanceNormalization of the groups."""
    flat = net.op("Reshape", x, ints(0, groups, -1))
    normal = net.op("InstanceNormalization", flat, np.ones(groups, np.float32), np.zeros(groups, np.float32))
    return net.op("Reshape", normal, net.op("Shape", x))


def group_norm_exported(net: Net, x: Value) -> Value:
    channels = x.shape[0]
    scaled = net.op("Mul", grouped(net, x, 2), net.around(channels, 1.0).reshape(-1, 1, 1))
    return Value(net.op("Add", scaled, net.around(channels).reshape(-1, 1, 1)), x.shape)


def group_norm_plain(net: Net, x: Value) -> Value:
    return Value(grouped(net, x, 2), x.shape)


def group_norm(net: Net, x: Value) -> Value:
    channels = x.shape[0]
    name = net.op("GroupNormalization", x, net.around(channels, 1.0), net.around(channels), num_groups=2)
    return Value(net.op("Relu", name), x.shape)


def layer_norm_of_maps(net: Net, x: Value) -> Value:
    """ConvNeXt: over channels, which go to the end and back."""
    turned = net.op("Transpose", x, perm=[0, 2, 3, 1])
    channels = x.shape[0]
    normal = net.op("LayerNormalization", turned, net.around(channels, 1.0), net.around(channels))
    return Value(net.op("Transpose", normal, perm=[0, 3, 1, 2]), x.shape)


def layer_norm_of_all(net: Net, x: Value) -> Value:
    """Over every axis but the batch, with a scale for each value."""
    scale = net.around(int(np.prod(x.shape)), 1.0).reshape(x.shape)
    return Value(net.op("LayerNormalization", x, scale, axis=1), x.shape)


def layer_norm_written_out(net: Net, x: Value) -> Value:
    centered = net.op("Sub", x, net.reduce("ReduceMean", x, -1))
    variance = net.reduce("ReduceMean", net.op("Pow", centered, floats(2).reshape(())), 2)
    root = net.op("Sqrt", net.op("Add", variance, floats(1e-5).reshape(())))
    normal = net.op("Mul", net.op("Div", centered, root), net.around(x.shape[-1], 1.0))
    return Value(net.op("Add", normal, net.around(x.shape[-1])), x.shape)


def layer_norm_without_scale_written_out(net: Net, x: Value) -> Value:
    centered = net.op("Sub", x, net.reduce("ReduceMean", x, -1))
    variance = net.reduce("ReduceMean", net.op("Mul", centered, centered), 2)
    return Value(net.op("Div", centered, net.op("Sqrt", net.op("Add", variance, floats(1e-5)))), x.shape)


def root_mean_square(net: Net, x: Value) -> str:
    """RMSNorm without scale."""
    mean = net.reduce("ReduceMean", net.op("Pow", x, floats(2)), 2)
    root = net.op("Sqrt", net.op("Add", mean, floats(1e-6)))
    return net.op("Mul", x, net.op("Reciprocal", root))


def rms_norm_written_out(net: Net, x: Value) -> Value:
    return Value(net.op("Mul", net.around(x.shape[-1], 1.0), root_mean_square(net, x)), x.shape)


def rms_norm_without_scale(net: Net, x: Value) -> Value:
    return Value(root_mean_square(net, x), x.shape)


def lengths_of_one(net: Net, x: Value) -> Value:
    """Cosine similarities to stored keys."""
    unit = net.op("LpNormalization", x, axis=-1, p=2)
    return net.linear(Value(unit, x.shape), 8)


def lengths_of_one_written_out(net: Net, x: Value) -> Value:
    """As torch exports F.normalize."""
    length = net.reduce("ReduceL2", x, -1)
    floor = net.op("Clip", length, floats(1e-12).reshape(()))
    spread = net.op("Expand", floor, net.op("Shape", x))
    return Value(net.op("Div", x, spread), x.shape)


def channel_affine(net: Net, x: Value) -> Value:
    """Scales and offsets of channels as stored vectors with axes for the map."""
    axes = ints(1, 2)
    scale = net.op("Unsqueeze", net.around(x.shape[0], 1.0), axes)
    return Value(net.op("Add", net.op("Mul", x, scale), net.op("Unsqueeze", net.around(x.shape[0]), axes)), x.shape)


MOTIFS = (
    *(Motif(build, MAP) for build in (
        instance_norm, instance_norm_plain, group_norm_exported, group_norm_plain, local_response, channel_affine,
    )),
    *(Motif(build, TOKENS) for build in (
        layer_norm_written_out, layer_norm_without_scale_written_out, rms_norm_written_out, rms_norm_without_scale,
        lengths_of_one,
    )),
    Motif(lengths_of_one_written_out, TOKENS, 8), Motif(mean_variance, MAP, 9),
    Motif(layer_norm, TOKENS, 17), Motif(layer_norm_without_bias, TOKENS, 17), Motif(layer_norm_of_ones, TOKENS, 17),
    Motif(layer_norm_of_maps, MAP, 17), Motif(group_norm, MAP, 21), Motif(rms_norm, TOKENS, 23),
    Motif(group_norm_of_ones, MAP, 21),
    Motif(layer_norm_of_all, TOKENS, 17), Motif(rms_norm_of_ones, TOKENS, 23),
)  # fmt: skip
