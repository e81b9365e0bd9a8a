"""One table: how each operator takes part when channels are scaled, shifted or turned, and the flows by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxq.graph import GraphIndex, NodeRef
from onnxq.passes.equalization import stream_rules as turns
from onnxq.passes.equalization.channels import (
    ScaledChannels,
    ShiftedChannels,
    SmoothedChannels,
    pass_scales,
    scale_add,
    scale_clip,
    scale_concat,
    scale_flat,
    scale_linear,
    scale_pad,
    scale_product,
    scale_resize,
    shift_add,
    shift_linear,
    smooth_linear,
    smooth_norm,
    smooth_values,
)
from onnxq.passes.equalization.streams import Streams


@dataclass(frozen=True)
class OperatorRules:
    """Effect of an operator on channels. A rule that is missing holds the channels that the operator reads.

    scale: those multiplied by positive factors; shift: with constants added; turn: multiplied by an orthogonal matrix;
    smooth: divided by the node that makes them, in front of linear operators that all read them.
    """

    scale: Callable[[ScaledChannels, NodeRef], bool] | None = None
    shift: Callable[[ShiftedChannels, NodeRef], bool] | None = None
    turn: Callable[[Streams, NodeRef], bool] | None = None
    smooth: Callable[[SmoothedChannels, NodeRef], bool] | None = None


RULES: dict[str, OperatorRules] = {
    "Conv": OperatorRules(scale_linear, shift_linear, turns.turn_conv),
    "ConvTranspose": OperatorRules(scale_linear, shift_linear),
    "Gemm": OperatorRules(scale_linear, shift_linear, turns.turn_gemm, smooth_linear),
    "MatMul": OperatorRules(scale_linear, shift_linear, turns.turn_matmul, smooth_linear),
    "Add": OperatorRules(scale_add, shift_add, turns.turn_add),
    "Sub": OperatorRules(turn=turns.turn_add),
    "Sum": OperatorRules(turn=turns.turn_sum),
    "Mul": OperatorRules(scale_product, None, turns.turn_product),
    "Div": OperatorRules(scale_product, None, turns.turn_product),
    "Neg": OperatorRules(turn=turns.pass_stream),
    "Pow": OperatorRules(turn=turns.turn_power),
    # A ReLU right behind the maker of a tensor belongs to that: see `shift_linear`.
    "Relu": OperatorRules(pass_scales),
    "LeakyRelu": OperatorRules(pass_scales),
    "PRelu": OperatorRules(pass_scales),
    "Clip": OperatorRules(scale_clip),
    "Identity": OperatorRules(pass_scales, None, turns.pass_stream),
    "Dropout": OperatorRules(pass_scales, None, turns.pass_stream),
    "Cast": OperatorRules(turn=turns.pass_stream),
    "MaxPool": OperatorRules(pass_scales),
    "AveragePool": OperatorRules(pass_scales),
    "GlobalMaxPool": OperatorRules(pass_scales),
    # Of [N, tokens, channels] it is a mean over the channels.
    "GlobalAveragePool": OperatorRules(pass_scales, None, turns.turn_mean),
    "Pad": OperatorRules(scale_pad),
    "Resize": OperatorRules(scale_resize),
    "Concat": OperatorRules(scale_concat, None, turns.turn_concat),
    "Flatten": OperatorRules(scale_flat, None, turns.turn_reshape),
    "Reshape": OperatorRules(scale_flat, None, turns.turn_reshape, smooth_values),
    "Squeeze": OperatorRules(turn=turns.turn_reshape),
    "Unsqueeze": OperatorRules(turn=turns.turn_reshape),
    "Transpose": OperatorRules(turn=turns.turn_transpose, smooth=smooth_values),
    "Gather": OperatorRules(turn=turns.turn_gather),
    "Slice": OperatorRules(turn=turns.turn_slice),
    "Split": OperatorRules(turn=turns.turn_split),
    "Expand": OperatorRules(turn=turns.turn_expand),
    "Shape": OperatorRules(turn=turns.ignore_values),
    "Size": OperatorRules(turn=turns.ignore_values),
    "ReduceL2": OperatorRules(turn=turns.turn_mean),
    "ReduceSumSquare": OperatorRules(turn=turns.turn_mean),
    "ReduceMean": OperatorRules(turn=turns.turn_mean),
    "ReduceSum": OperatorRules(turn=turns.turn_mean),
    "LayerNormalization": OperatorRules(turn=turns.turn_normalized, smooth=smooth_norm),
    "RMSNormalization": OperatorRules(turn=turns.turn_normalized),
    "SimplifiedLayerNormalization": OperatorRules(turn=turns.turn_normalized),
    "SkipLayerNormalization": OperatorRules(turn=turns.turn_normalized_sum),
    "SkipSimplifiedLayerNormalization": OperatorRules(turn=turns.turn_normalized_sum),
    "Attention": OperatorRules(turn=turns.turn_attention),
    "GroupQueryAttention": OperatorRules(turn=turns.turn_attention),
    "MultiHeadAttention": OperatorRules(turn=turns.turn_attention),
}


def find_scaled_channels(index: GraphIndex) -> ScaledChannels:
    """The channels of every scope that may be multiplied, and the weights that make and read them."""
    flow = ScaledChannels(index)
    flow.visit_nodes({name: rules.scale for name, rules in RULES.items()})
    return flow.finish()


def find_shifted_channels(index: GraphIndex) -> ShiftedChannels:
    """The tensors that may be lowered, with the layers that take the constants back."""
    flow = ShiftedChannels(index)
    flow.visit_nodes({name: rules.shift for name, rules in RULES.items()})
    return flow


def find_streams(index: GraphIndex) -> Streams:
    """Every stream of the model, in the order the model runs in."""
    flow = Streams(index)
    flow.visit_nodes({name: rules.turn for name, rules in RULES.items()})
    return flow


def find_smoothed_channels(index: GraphIndex) -> SmoothedChannels:
    """The tensors that a node in front of them can write divided."""
    flow = SmoothedChannels(index)
    flow.visit_nodes({name: rules.smooth for name, rules in RULES.items()})
    return flow
