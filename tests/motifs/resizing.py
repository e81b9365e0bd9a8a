"""U-Nets, pyramids and other ways up: Resize in each of its forms, transposed convolutions, rearranged pixels."""

import numpy as np

from tests.motifs.net import FLOAT, INT64, MAP, Motif, Net, Value, floats, ints, named


def down(net: Net, x: Value) -> Value:
    """Half of the height and width, rounded up."""
    channels, height, width = x.shape
    weight = net.weight(channels, channels, 3, 3)
    name = net.op("Conv", x, weight, net.around(channels), strides=[2, 2], pads=[1, 1, 1, 1])
    return Value(net.op("Relu", name), (channels, (height + 1) // 2, (width + 1) // 2))


def merge(net: Net, x: Value, up: str) -> Value:
    """A U-Net's skip: both one behind the other, and a convolution."""
    both = net.op("Concat", x, up, axis=1)
    return net.conv(Value(both, (2 * x.shape[0], *x.shape[1:])), x.shape[0])


def unet_scales(net: Net, x: Value, mode: str, **attributes: object) -> Value:
    low = down(net, x)
    scales = floats(1, 1, *(big / small for big, small in zip(x.shape[1:], low.shape[1:], strict=True)))
    return merge(net, x, net.op("Resize", low, "", scales, mode=mode, **attributes))


def unet_sizes_of_skip(net: Net, x: Value, mode: str, transformation: str, **attributes: object) -> Value:
    """As torch exports F.interpolate(low, size=skip.shape[2:])."""
    low = down(net, x)
    sizes = net.op("Concat", net.dims(low, 0, 2), net.dims(x, 2, 4), axis=0)
    ways = {"mode": mode, "coordinate_transformation_mode": transformation, **attributes}
    return merge(net, x, net.op("Resize", low, "", "", sizes, **ways))


unet_nearest_scales = named("unet_nearest_scales", unet_scales, "nearest")
unet_linear_scales = named("unet_linear_scales", unet_scales, "linear", coordinate_transformation_mode="align_corners")
unet_nearest_sizes_of_skip = named(
    "unet_nearest_sizes_of_skip", unet_sizes_of_skip, "nearest", "asymmetric", nearest_mode="floor"
)
unet_linear_sizes_of_skip = named("unet_linear_sizes_of_skip", unet_sizes_of_skip, "linear", "pytorch_half_pixel")


def unet_linear_sizes_stored(net: Net, x: Value) -> Value:
    low = down(net, x)
    sizes = net.op("Concat", net.dims(low, 0, 2), ints(*x.shape[1:]), axis=0)
    return merge(net, x, net.op("Resize", low, "", "", sizes, mode="linear"))


def unet_nearest_sizes_stored(net: Net, x: Value) -> Value:
    """All four sizes are stored, which takes a batch of one."""
    return merge(net, x, net.op("Resize", down(net, x), "", "", ints(1, *x.shape), mode="nearest"))


def unet_linear_scales_of_skip(net: Net, x: Value) -> Value:
    """Scales that are computed of two shapes."""
    low = down(net, x)
    big, small = (net.op("Cast", net.op("Shape", value), to=FLOAT) for value in (x, low))
    up = net.op(
        "Resize", low, "", net.op("Div", big, small), mode="linear", coordinate_transformation_mode="asymmetric"
    )
    return merge(net, x, up)


def unet_sizes_as_input(net: Net, x: Value) -> Value:
    low = down(net, x)
    wish = net.feed(INT64, [2], lambda rng: ints(*x.shape[1:]))
    sizes = net.op("Concat", net.dims(low, 0, 2), wish, axis=0)
    return merge(net, x, net.op("Resize", low, "", "", sizes, mode="nearest"))


def resize_to_input_of_all_axes(net: Net, x: Value) -> Value:
    sizes = net.feed(INT64, [4], lambda rng: ints(1, *x.shape))
    return Value(net.op("Resize", down(net, x), "", "", sizes, mode="linear"), x.shape)


def scales_as_input(net: Net, x: Value, mode: str, pool: str) -> Value:
    scales = net.feed(FLOAT, [4], lambda rng: floats(1, 1, 2, 2))
    up = net.op("Resize", x, "", scales, mode=mode)
    return Value(net.op(pool, up, kernel_shape=[2, 2], strides=[2, 2]), x.shape)


resize_scales_as_input = named("resize_scales_as_input", scales_as_input, "nearest", "MaxPool")
resize_linear_scales_as_input = named("resize_linear_scales_as_input", scales_as_input, "linear", "AveragePool")


def resize_axes_to_input(net: Net, x: Value) -> Value:
    low = down(net, x)
    sizes = net.feed(INT64, [2], lambda rng: ints(*x.shape[1:]))
    return merge(net, x, net.op("Resize", low, "", "", sizes, mode="linear", axes=[2, 3]))


def resize_of_region(net: Net, x: Value) -> Value:
    """The middle of the map, cut out and resized by one operator."""
    region = floats(0, 0, 0.25, 0.25, 1, 1, 0.75, 0.75)
    name = net.op("Resize", x, region, "", ints(1, *x.shape), mode="linear",
                  coordinate_transformation_mode="tf_crop_and_resize")  # fmt: skip
    return Value(name, x.shape)


def resize_axes_of_skip(net: Net, x: Value) -> Value:
    low = down(net, x)
    return merge(net, x, net.op("Resize", low, "", "", net.dims(x, 2, 4), mode="nearest", axes=[2, 3]))


def resize_axes_cubic(net: Net, x: Value) -> Value:
    low = down(net, x)
    return merge(net, x, net.op("Resize", low, "", "", ints(*x.shape[1:]), mode="cubic", axes=[2, 3]))


def resize_antialiased(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    shape = (channels, max(height // 2, 1), max(width // 2, 1))
    sizes = net.op("Concat", net.dims(x, 0, 2), ints(*shape[1:]), axis=0)
    return Value(net.op("Resize", x, "", "", sizes, mode="linear", antialias=1), shape)


def pyramid(net: Net, x: Value) -> Value:
    """FPN: lateral convolutions, each level resized to the next and added, every level an output."""
    levels = [x, down(net, x)]
    levels.append(down(net, levels[-1]))
    top = net.conv(levels[-1], 8)
    for level in levels[-2::-1]:
        sizes = net.op("Concat", net.dims(top, 0, 2), net.dims(level, 2, 4), axis=0)
        up = net.op("Resize", top, "", "", sizes, mode="nearest")
        lateral = net.conv(level, 8)
        top = net.conv(Value(net.op("Add", lateral, up), lateral.shape), 8, 3)
        net.give(top.name)
    return top


def pixel_shuffle(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    wide = net.conv(x, 4 * channels)
    return Value(net.op("DepthToSpace", wide, blocksize=2, mode="CRD"), (channels, 2 * height, 2 * width))


def pixel_shuffle_written_out(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    wide = net.conv(x, 4 * channels)
    split = net.op("Reshape", wide, ints(0, channels, 2, 2, height, width))
    turned = net.op("Transpose", split, perm=[0, 1, 4, 2, 5, 3])
    return Value(net.op("Reshape", turned, ints(0, channels, 2 * height, 2 * width)), (channels, 2 * height, 2 * width))


def space_to_depth(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    even = net.op("Resize", x, "", floats(1, 1, 2, 2), mode="nearest")
    return Value(net.op("SpaceToDepth", even, blocksize=2), (4 * channels, height, width))


def conv_transpose(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    weight = net.weight(channels, 6, 2, 2, fan=channels)
    name = net.op("ConvTranspose", x, weight, net.around(6), strides=[2, 2])
    return Value(name, (6, 2 * height, 2 * width))


def conv_transpose_groups_output_padding(net: Net, x: Value) -> Value:
    x = net.conv(x, 8)
    weight = net.weight(8, 2, 3, 3, fan=9)
    name = net.op("ConvTranspose", x, weight, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1], group=4)
    return Value(name, (8, 2 * x.shape[1], 2 * x.shape[2]))


def conv_transpose_output_shape(net: Net, x: Value) -> Value:
    channels, height, width = x.shape
    weight = net.weight(channels, channels, 3, 3, fan=9 * channels // 4)
    shape = [2 * height - 1, 2 * width]
    name = net.op("ConvTranspose", x, weight, strides=[2, 2], output_shape=shape, auto_pad="SAME_UPPER")
    return Value(name, (channels, *shape))


def conv_transpose_of_rows(net: Net, x: Value) -> Value:
    """One axis, dilated, with more padding at one end: a vocoder's way up."""
    channels, height, width = x.shape
    flat = net.op("Reshape", x, ints(0, channels, height * width))
    weight = net.weight(channels, 6, 3, fan=2 * channels)
    name = net.op("ConvTranspose", flat, weight, net.around(6), strides=[2], dilations=[2], pads=[2, 1])
    # (length - 1) * 2 + 5 - 3
    split = net.op("Reshape", name, ints(0, 6, 2 * height, width))
    return Value(net.op("LeakyRelu", split, alpha=0.1), (6, 2 * height, width))


def fold_of_columns(net: Net, x: Value) -> Value:
    """Overlapping patches added up."""
    channels, height, width = x.shape
    wide = net.conv(x, 4 * channels)
    columns = net.op("Reshape", wide, ints(0, 4 * channels, height * width))
    shape = ints(height + 1, width + 1)
    return Value(net.op("Col2Im", columns, shape, ints(2, 2)), (channels, height + 1, width + 1))


def centered_crop(net: Net, x: Value) -> Value:
    """A skip cut to what is in its middle, as U-Nets without pads do."""
    channels, height, width = x.shape
    shape = (max(height - 2, 1), max(width - 1, 1))
    return Value(net.op("CenterCropPad", x, ints(*shape), axes=[2, 3]), (channels, *shape))


def grid_sample(net: Net, x: Value) -> Value:
    """A warp by a flow that the network predicts."""
    _, height, width = x.shape
    flow = net.op("Tanh", net.conv(x, 2))
    grid = net.op("Transpose", flow, perm=[0, 2, 3, 1])
    return Value(net.op("GridSample", x, grid, padding_mode="border"), (x.shape[0], height, width))


def affine_grid(net: Net, x: Value) -> Value:
    """A spatial transformer: its matrix comes of a Gemm, its grid's size of Shape."""
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    bias = np.array([1, 0, 0, 0, 1, 0], np.float32)
    theta = net.op("Gemm", pooled, net.weight(6, x.shape[0]) * np.float32(0.2), bias, transB=1)
    grid = net.op("AffineGrid", net.op("Reshape", theta, ints(-1, 2, 3)), net.op("Shape", x))
    return Value(net.op("GridSample", x, grid), x.shape)


MOTIFS = (
    *(Motif(build, MAP) for build in (
        unet_nearest_scales, unet_linear_scales, pixel_shuffle_written_out, space_to_depth, conv_transpose,
        conv_transpose_groups_output_padding, conv_transpose_output_shape,
    )),
    *(Motif(build, MAP, 11) for build in (
        unet_nearest_sizes_of_skip, unet_linear_sizes_of_skip, unet_linear_sizes_stored, unet_sizes_as_input,
        unet_nearest_sizes_stored, resize_to_input_of_all_axes, resize_of_region, pyramid, pixel_shuffle,
    )),
    *(Motif(build, MAP, 18) for build in (resize_axes_to_input, fold_of_columns, centered_crop)),
    Motif(conv_transpose_of_rows, MAP), Motif(resize_scales_as_input, MAP, 9),
    Motif(resize_linear_scales_as_input, MAP, 9), Motif(unet_linear_scales_of_skip, MAP, 9),
    Motif(resize_axes_of_skip, MAP, 18), Motif(resize_axes_cubic, MAP, 18), Motif(resize_antialiased, MAP, 18),
    Motif(grid_sample, MAP, 16), Motif(affine_grid, MAP, 20),
)  # fmt: skip
