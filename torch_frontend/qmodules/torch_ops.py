"""Tables of torch's own modules, functions and tensor methods by operator, registered when this module is imported."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torch_frontend.qmodules.calls import Add, Cat, MatMul, Mul
from torch_frontend.qmodules.registry import find_function_entry, find_method_entry, make_entry, register_target

F: Any = functional
_WEIGHT = ("input", "weight", "bias")
_X = ("input",)

# operator -> module classes without a weight; those with one are registered in `layers`.
MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "add": (Add,),
    "mul": (Mul,),
    "matmul": (MatMul,),
    "cat": (Cat,),
    "relu": (nn.ReLU,),
    "relu6": (nn.ReLU6,),
    "clamp": (nn.Hardtanh,),
    "leaky_relu": (nn.LeakyReLU, nn.RReLU),
    "prelu": (nn.PReLU,),
    "elu": (nn.ELU, nn.CELU, nn.SELU),
    "sigmoid": (nn.Sigmoid,),
    "silu": (nn.SiLU,),
    "gelu": (nn.GELU,),
    "mish": (nn.Mish,),
    "hardsigmoid": (nn.Hardsigmoid,),
    "hardswish": (nn.Hardswish,),
    "tanh": (nn.Tanh,),
    "softplus": (nn.Softplus,),
    "softmax": (nn.Softmax, nn.Softmax2d),
    "log_softmax": (nn.LogSoftmax,),
    "glu": (nn.GLU,),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    "group_norm": (nn.GroupNorm,),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    "layer_norm": (nn.LayerNorm,),
    "rms_norm": (nn.RMSNorm,),
    "avg_pool": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    "adaptive_avg_pool": (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    "max_pool": (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    "adaptive_max_pool": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    "interpolate": (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
    # The operator copies values into a larger tensor, constants included.
    "pad": (
        nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
        nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
        nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d,
    ),
    "reshape": (nn.Flatten, nn.Unflatten),
    "transpose": (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
    "identity": (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    # Known, so that they are named in graphs and reports, and never quantized.
    "float": (nn.LocalResponseNorm, nn.Softsign, nn.LogSigmoid, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
              nn.Threshold, nn.Softmin, nn.CosineSimilarity, nn.PairwiseDistance, nn.Unfold, nn.Fold),
    "lstm": (nn.LSTM, nn.LSTMCell),
    "gru": (nn.GRU, nn.GRUCell),
    "rnn": (nn.RNN, nn.RNNCell),
    "multihead_attention": (nn.MultiheadAttention,),
}  # fmt: skip

# (operator, functions, names of their first arguments where they are not the operator's data arguments).
# An operator has several rows where torch names the arguments differently.
FUNCTIONS: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("conv", (F.conv1d, F.conv2d, F.conv3d), _WEIGHT),
    ("conv_transpose", (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _WEIGHT),
    ("linear", (F.linear,), _WEIGHT),
    ("bilinear", (F.bilinear,), ("input1", "input2", "weight", "bias")),
    ("embedding", (F.embedding,), ("input", "weight")),
    ("matmul", (torch.matmul, operator.matmul), ()),
    ("matmul", (torch.mm, torch.bmm), ("input", "mat2")),
    ("matmul", (torch.mv,), ("input", "vec")),
    ("attention", (F.scaled_dot_product_attention,), ()),
    ("add", (torch.add, operator.add, operator.iadd), ()),
    ("sub", (torch.sub, torch.subtract, operator.sub, operator.isub), ()),
    ("mul", (torch.mul, torch.multiply, operator.mul, operator.imul), ()),
    ("div", (torch.div, torch.true_divide, operator.truediv, operator.itruediv), ()),
    ("cat", (torch.cat, torch.concat, torch.concatenate), ()),
    ("stack", (torch.stack, torch.hstack, torch.vstack, torch.dstack), ()),
    ("where", (torch.where,), ("condition", "input", "other")),
    ("masked_fill", (torch.masked_fill,), ()),
    ("relu", (F.relu, torch.relu, F.relu_, torch.relu_), ()),
    ("relu6", (F.relu6,), ()),
    ("clamp", (torch.clamp, torch.clip, F.hardtanh, torch.clamp_min, torch.clamp_max), ()),
    ("leaky_relu", (F.leaky_relu, F.rrelu), ()),
    ("prelu", (F.prelu, torch.prelu), ()),
    ("elu", (F.elu, F.celu, F.selu), ()),
    ("sigmoid", (torch.sigmoid, F.sigmoid), ()),
    ("silu", (F.silu,), ()),
    ("gelu", (F.gelu,), ()),
    ("mish", (F.mish,), ()),
    ("hardsigmoid", (F.hardsigmoid,), ()),
    ("hardswish", (F.hardswish,), ()),
    ("tanh", (torch.tanh, F.tanh), ()),
    ("softplus", (F.softplus,), ()),
    ("softmax", (F.softmax, torch.softmax), ()),
    ("log_softmax", (F.log_softmax, torch.log_softmax), ()),
    ("glu", (F.glu,), ()),
    ("batch_norm", (F.batch_norm,), ()),
    ("group_norm", (F.group_norm, torch.group_norm), ()),
    ("instance_norm", (F.instance_norm,), ()),
    ("layer_norm", (F.layer_norm, torch.layer_norm), ()),
    ("rms_norm", (F.rms_norm,), ()),
    ("avg_pool", (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), ()),
    ("adaptive_avg_pool", (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), ()),
    ("max_pool", (F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d), ()),
    ("adaptive_max_pool", (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), ()),
    ("mean", (torch.mean,), ()),
    ("sum", (torch.sum,), ()),
    ("interpolate", (F.interpolate, F.upsample), ()),
    ("pad", (F.pad,), ()),
    ("split", (torch.chunk, torch.split, torch.unbind, torch.tensor_split), _X),
    ("slice", (torch.narrow, torch.select, torch.index_select, torch.gather, operator.getitem), _X),
    ("reshape", (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten), _X),
    ("transpose", (torch.permute, torch.transpose, torch.t, torch.movedim, torch.swapaxes, torch.flip, torch.roll,
                   F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle), _X),
    ("expand", (torch.tile, torch.repeat_interleave, torch.broadcast_to), _X),
    ("identity", (F.dropout, torch.dropout, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.clone,
                  torch.detach), _X),
    ("float", (
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
    ), _X),
)  # fmt: skip

# (operator, names of tensor methods, names of self and the first arguments where they are not the operator's).
METHODS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("matmul", ("matmul", "mm", "bmm", "__matmul__"), ("input", "other")),
    ("add", ("add", "__add__", "__radd__", "__iadd__"), ()),
    ("sub", ("sub", "subtract"), ()),
    ("mul", ("mul", "multiply"), ()),
    ("div", ("div", "true_divide"), ()),
    ("where", ("where",), ("input", "condition", "other")),
    ("masked_fill", ("masked_fill",), ()),
    ("relu", ("relu",), ()),
    ("clamp", ("clamp", "clip", "clamp_min", "clamp_max"), ()),
    ("prelu", ("prelu",), ()),
    ("sigmoid", ("sigmoid",), ()),
    ("tanh", ("tanh",), ()),
    ("softmax", ("softmax",), ()),
    ("log_softmax", ("log_softmax",), ()),
    ("mean", ("mean",), ()),
    ("sum", ("sum",), ()),
    ("split", ("chunk", "split", "unbind", "tensor_split"), _X),
    ("slice", ("narrow", "select", "index_select", "gather", "__getitem__"), _X),
    ("reshape", ("flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "reshape_as", "view_as"), _X),
    ("transpose", ("permute", "transpose", "t", "movedim", "swapaxes", "flip", "roll"), _X),
    ("expand", ("expand", "expand_as", "repeat", "tile", "repeat_interleave"), _X),
    ("identity", ("contiguous", "clone", "detach"), _X),
    ("cast", ("to", "float", "half", "bfloat16", "type_as", "double", "type", "cuda", "cpu"), _X),
    ("float", (
        "exp", "log", "sqrt", "rsqrt", "pow", "abs", "neg", "sin", "cos", "erf", "square", "reciprocal", "max", "min",
        "amax", "amin", "argmax", "argmin", "topk", "sort", "cumsum", "var", "std", "norm", "prod", "floor_divide",
        "size", "dim", "numel", "item", "new_zeros", "new_ones", "new_full", "eq", "ne", "gt", "lt",
        "ge", "le", "long", "int", "bool", "any", "all", "tril", "triu", "stride", "sign", "round", "floor", "fill_",
        "logical_not", "is_floating_point", "ndimension", "maximum", "minimum",
    ), _X),
)  # fmt: skip


def _register_all() -> None:
    for op, classes in MODULES.items():
        # Cat's forward takes a list, like torch.cat.
        params = ("tensors",) if op == "cat" else ()
        for cls in classes:
            register_target(cls, make_entry(op, params))
    for op, functions, params in FUNCTIONS:
        for function in functions:
            # Several names in torch are one function; the first row that names it counts.
            if find_function_entry(function) is None:
                register_target(function, make_entry(op, params))
    for op, names, params in METHODS:
        for name in names:
            if find_method_entry(name) is None:
                register_target(name, make_entry(op, params))


_register_all()
# In-place methods: tracing makes them out of place, so both are one operator.
for _name in ("add", "sub", "mul", "div", "relu", "sigmoid", "tanh", "clamp"):
    _plain = find_method_entry(_name)
    if _plain is not None:
        register_target(f"{_name}_", _plain)
