"""Tables of torch's own modules, functions and tensor methods by operator, registered when this module is imported."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torch_frontend.qmodules.calls import Add, Cat, MatMul, Mul
from torch_frontend.qmodules.registry import Target, register_targets

F: Any = functional

# Operator -> module classes without a weight, functions, and names of tensor methods, which take the operator's data
# arguments first. Tracing makes in-place methods out of place, so both are one operator.
TARGETS: dict[str, tuple[Target, ...]] = {
    "matmul": (MatMul, torch.matmul, operator.matmul, "matmul", "mm", "bmm", "__matmul__"),
    "attention": (F.scaled_dot_product_attention,),
    "add": (Add, torch.add, operator.add, operator.iadd, "add", "add_", "__add__", "__radd__", "__iadd__"),
    "sub": (torch.sub, torch.subtract, operator.sub, operator.isub, "sub", "sub_", "subtract"),
    "mul": (Mul, torch.mul, torch.multiply, operator.mul, operator.imul, "mul", "mul_", "multiply"),
    "div": (torch.div, torch.true_divide, operator.truediv, operator.itruediv, "div", "div_", "true_divide"),
    "cat": (Cat, torch.cat, torch.concat, torch.concatenate),
    "stack": (torch.stack, torch.hstack, torch.vstack, torch.dstack),
    "masked_fill": (torch.masked_fill, "masked_fill"),
    "relu": (nn.ReLU, F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_"),
    "relu6": (nn.ReLU6, F.relu6),
    "clamp": (
        nn.Hardtanh, torch.clamp, torch.clip, F.hardtanh, torch.clamp_min, torch.clamp_max,
        "clamp", "clamp_", "clip", "clamp_min", "clamp_max",
    ),
    "leaky_relu": (nn.LeakyReLU, nn.RReLU, F.leaky_relu, F.rrelu),
    "prelu": (nn.PReLU, F.prelu, torch.prelu, "prelu"),
    "elu": (nn.ELU, nn.CELU, nn.SELU, F.elu, F.celu, F.selu),
    "sigmoid": (nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_"),
    "silu": (nn.SiLU, F.silu),
    "gelu": (nn.GELU, F.gelu),
    "mish": (nn.Mish, F.mish),
    "hardsigmoid": (nn.Hardsigmoid, F.hardsigmoid),
    "hardswish": (nn.Hardswish, F.hardswish),
    "tanh": (nn.Tanh, torch.tanh, F.tanh, "tanh", "tanh_"),
    "softplus": (nn.Softplus, F.softplus),
    "softmax": (nn.Softmax, nn.Softmax2d, F.softmax, torch.softmax, "softmax"),
    "log_softmax": (nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax"),
    "glu": (nn.GLU, F.glu),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, F.batch_norm),
    "group_norm": (nn.GroupNorm, F.group_norm, torch.group_norm),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm),
    "layer_norm": (nn.LayerNorm, F.layer_norm, torch.layer_norm),
    "rms_norm": (nn.RMSNorm, F.rms_norm),
    "avg_pool": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive_avg_pool": (
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
        F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    ),
    "max_pool": (
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d,
        torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
    ),
    "adaptive_max_pool": (
        nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
        F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
    ),
    "mean": (torch.mean, "mean"),
    "sum": (torch.sum, "sum"),
    "interpolate": (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample),
    # The operator copies values into a larger tensor, constants included.
    "pad": (
        F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
        nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
        nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d,
    ),
    "split": (
        torch.chunk, torch.split, torch.unbind, torch.tensor_split, "chunk", "split", "unbind", "tensor_split",
    ),
    "slice": (
        torch.narrow, torch.select, torch.index_select, torch.gather, operator.getitem,
        "narrow", "select", "index_select", "gather", "__getitem__",
    ),
    "reshape": (
        nn.Flatten, nn.Unflatten, torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten,
        "flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "reshape_as", "view_as",
    ),
    "transpose": (
        nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle,
        torch.permute, torch.transpose, torch.t, torch.movedim, torch.swapaxes, torch.flip, torch.roll,
        "permute", "transpose", "t", "movedim", "swapaxes", "flip", "roll",
    ),
    "expand": (
        torch.tile, torch.repeat_interleave, torch.broadcast_to,
        "expand", "expand_as", "repeat", "tile", "repeat_interleave",
    ),
    "identity": (
        nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, F.dropout, torch.dropout,
        F.dropout2d, F.dropout3d, F.alpha_dropout, torch.clone, torch.detach, "contiguous", "clone", "detach",
    ),
    "cast": ("to", "float", "half", "bfloat16", "type_as", "double", "type", "cuda", "cpu"),
    # Known, so that they are named in graphs and reports, and never quantized.
    "float": (
        nn.LocalResponseNorm, nn.Softsign, nn.LogSigmoid, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold,
        nn.Softmin, nn.CosineSimilarity, nn.PairwiseDistance, nn.Unfold, nn.Fold,
        torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.pow, operator.pow, torch.abs, torch.neg, operator.neg,
        torch.sin, torch.cos, torch.erf, torch.square, torch.reciprocal, torch.minimum, torch.maximum, torch.floor,
        torch.max, torch.min, torch.amax, torch.amin, torch.argmax, torch.argmin, torch.topk, torch.sort, torch.cumsum,
        torch.var, torch.std, torch.norm, torch.prod, F.normalize, F.logsigmoid, F.softsign, F.local_response_norm,
        torch.floor_divide, operator.floordiv, operator.mod, torch.eq, operator.eq, operator.ne, operator.gt,
        operator.lt, operator.ge, operator.le, operator.and_, operator.or_, operator.invert, torch.arange, torch.zeros,
        torch.ones, torch.full, torch.zeros_like, torch.ones_like, torch.full_like, torch.sign,
        torch.round, torch.any, torch.all, torch.logical_not, torch.logical_and, torch.logical_or, torch.tril,
        torch.triu, torch.meshgrid, F.one_hot, torch.numel, F.grid_sample, F.unfold, F.fold, torch.rand,
        torch.rand_like, torch.randn_like,
        "exp", "log", "sqrt", "rsqrt", "pow", "abs", "neg", "sin", "cos", "erf", "square", "reciprocal", "max", "min",
        "amax", "amin", "argmax", "argmin", "topk", "sort", "cumsum", "var", "std", "norm", "prod", "floor_divide",
        "size", "dim", "numel", "item", "new_zeros", "new_ones", "new_full", "eq", "ne", "gt", "lt",
        "ge", "le", "long", "int", "bool", "any", "all", "tril", "triu", "stride", "sign", "round", "floor", "fill_",
        "logical_not", "is_floating_point", "ndimension", "maximum", "minimum",
    ),
    "lstm": (nn.LSTM, nn.LSTMCell),
    "gru": (nn.GRU, nn.GRUCell),
    "rnn": (nn.RNN, nn.RNNCell),
    "multihead_attention": (nn.MultiheadAttention,),
}  # fmt: skip

_WEIGHT = ("input", "weight", "bias")
# (operator, functions or methods, names of their first arguments), where these are not the operator's data arguments.
RENAMED: tuple[tuple[str, tuple[Target, ...], tuple[str, ...]], ...] = (
    ("conv", (F.conv1d, F.conv2d, F.conv3d), _WEIGHT),
    ("conv_transpose", (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _WEIGHT),
    ("linear", (F.linear,), _WEIGHT),
    ("bilinear", (F.bilinear,), ("input1", "input2", "weight", "bias")),
    ("embedding", (F.embedding,), ("input", "weight")),
    ("matmul", (torch.mm, torch.bmm), ("input", "mat2")),
    ("matmul", (torch.mv,), ("input", "vec")),
    ("where", (torch.where,), ("condition", "input", "other")),
    ("where", ("where",), ("input", "condition", "other")),
)

for _op, _targets in TARGETS.items():
    register_targets(*_targets, op=_op)
for _op, _targets, _params in RENAMED:
    register_targets(*_targets, op=_op, params=_params)
