"""Normalizations as operators and written out, with and without scale."""

from __future__ import annotations

import numpy as np

from tests.motifs.net import MAP, TOKENS, Motif, Net, Value, floats, ints


def instance_norm(net: Net, x: Value) -> Value:
    channels = x.shape[0]
    return Value(net.op("InstanceNormalization", x, net.around(channels, 1.0), net.around(channels)), x.shape)


def instance_norm_plain(net: Net, x: Value) -> Value:
    channels = x.shape[0]
    return Value(
        net.op("InstanceNormalization", x, np.ones(channels, np.float32), np.zeros(channels, np.float32)), x.shape
    )


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


def group_norm_of_ones(net: Net, x: Value) -> Value:
    values = [np.full(x.shape[0], fill, np.float32) for fill in (1, 0)]
    return Value(net.op("GroupNormalization", x, *values, num_groups=2), x.shape)


def layer_norm(net: Net, x: Value) -> Value:
    width = x.shape[-1]
    return Value(net.op("LayerNormalization", x, net.around(width, 1.0), net.around(width), axis=-1), x.shape)


def layer_norm_without_bias(net: Net, x: Value) -> Value:
    return Value(net.op("LayerNormalization", x, net.around(x.shape[-1], 1.0), epsilon=1e-3), x.shape)


def layer_norm_of_ones(net: Net, x: Value) -> Value:
    return Value(net.op("LayerNormalization", x, np.ones(x.shape[-1], np.float32)), x.shape)


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


def rms_norm(net: Net, x: Value) -> Value:
    return Value(net.op("RMSNormalization", x, net.around(x.shape[-1], 1.0)), x.shape)


def rms_norm_of_ones(net: Net, x: Value) -> Value:
    return Value(net.op("RMSNormalization", x, np.ones(x.shape[-1], np.float32), epsilon=1e-6), x.shape)


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


def mean_variance(net: Net, x: Value) -> Value:
    return Value(net.op("MeanVarianceNormalization", x, axes=[0, 2, 3]), x.shape)


def local_response(net: Net, x: Value) -> Value:
    return Value(net.op("LRN", x, size=3, alpha=0.01), x.shape)


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
