"""Where each target wants pairs, operator by operator: the front end's words for the rules of onnxq.targets.

Both must say the same, so that a model is trained with the pairs that its engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onnxq.targets import Output

_BOUNDS = ("relu", "relu6", "clamp")


@dataclass(frozen=True, kw_only=True)
class Place:
    """How one operator is quantized on one target.

    inputs: all of its activations; the skip branch of a residual sum; or none (its weight alone, or what joins).
    output: whether its kernel needs a pair behind it. fuses: operators that disappear into the kernel before that pair.
    compute: worth quantizing for; the others follow where all they read and somebody who reads them is quantized.
    shares: inputs and output have one scale. joins: only where pairs are there for others' sake.
    activations: the number of computed operands it must have (None: any); other calls of the operator stay float.
    attention: only when asked for. cut: its result needs a pair where it is cut into operands of attention.
    two: the place of calls with two computed operands, where that is another one.
    """

    inputs: Literal["all", "skip", "none"] = "all"
    output: Output = Output.FLOAT
    fuses: tuple[str, ...] = ()
    compute: bool = False
    shares: bool = False
    joins: bool = False
    activations: int | None = None
    attention: bool = False
    cut: bool = False
    two: Place | None = None


_LAYER = Place(compute=True)
_FOLLOWER = Place(output=Output.PAIR)
_MOVE = Place(output=Output.PAIR, shares=True)
_BOTH = Place(output=Output.PAIR, fuses=_BOUNDS, activations=2)

ORT: Mapping[str, Place] = {
    # batch norms are folded into the convolution at export, if they were not before
    "conv": Place(compute=True, output=Output.PAIR, fuses=("batch_norm", *_BOUNDS)),
    "linear": _LAYER,
    "matmul": Place(compute=True, activations=1),
    "add": _BOTH,
    "mul": _BOTH,
    "cat": Place(output=Output.PAIR),
    "adaptive_avg_pool": _FOLLOWER,
    "leaky_relu": _FOLLOWER,
    "max_pool": _MOVE,
    "reshape": _MOVE,
    "transpose": _MOVE,
    "slice": _MOVE,
}

TRT: Mapping[str, Place] = {
    "conv": _LAYER,
    "linear": Place(compute=True, cut=True),
    "matmul": Place(compute=True, activations=1, cut=True, two=Place(compute=True, attention=True)),
    "attention": Place(compute=True, attention=True),
    "add": Place(inputs="skip"),
    "cat": Place(inputs="none", shares=True, joins=True),
    "max_pool": Place(inputs="none", shares=True, joins=True),
}

_SMOOTH = ("relu", "relu6", "clamp", "leaky_relu", "prelu", "elu", "sigmoid", "silu", "gelu", "mish", "hardsigmoid",
           "hardswish", "tanh", "softplus", "glu")  # fmt: skip
_NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")

VIRTUAL: Mapping[str, Place] = {
    **dict.fromkeys(
        ("conv", "conv_transpose", "linear", "bilinear", "matmul", "attention", "softmax", "log_softmax", "avg_pool",
         "adaptive_avg_pool", "mean", "sum", "interpolate", *_SMOOTH, *_NORMS),
        _LAYER,
    ),
    **dict.fromkeys(("add", "sub", "mul"), Place(compute=True, activations=2)),
    "embedding": Place(inputs="none", compute=True),
}  # fmt: skip

PLACES: Mapping[str, Mapping[str, Place]] = {"ort": ORT, "trt": TRT, "virtual": VIRTUAL}

# What runs as one kernel: a pair between the two rounds twice. First operator -> what disappears behind it.
REDUNDANT: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("conv", "conv_transpose"),
        frozenset(("batch_norm", "relu", "relu6", "clamp", "sigmoid", "leaky_relu", "prelu", "elu", "mish", "silu",
                   "hardsigmoid", "hardswish", "tanh")),
    ),
    "linear": frozenset(("batch_norm", "relu", "relu6", "clamp", "sigmoid", "leaky_relu", "prelu", "elu", "mish",
                         "silu", "hardsigmoid", "hardswish", "tanh", "gelu")),
    "batch_norm": frozenset(("relu", "relu6", "clamp", "sigmoid", "leaky_relu", "mish", "silu", "hardsigmoid",
                             "hardswish")),
    "add": frozenset(("relu", "relu6", "clamp")),
}  # fmt: skip
