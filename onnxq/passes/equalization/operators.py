"""One table: how each operator takes part when channels are scaled, shifted or turned, and the flows by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from onnxq.graph import GraphIndex, NodeRef
from onnxq.passes.equalization import channels
from onnxq.passes.equalization import stream_rules as turns
from onnxq.passes.equalization.streams import Streams
from onnxq.sites import TensorId


@dataclass(frozen=True)
class OperatorRules:
    """Effect of an operator on channels. A rule that is missing holds the channels that the operator reads.

    scale: those multiplied by positive factors; shift: with constants added; turn: multiplied by an orthogonal matrix.
    """

    scale: Callable[[channels.ScaledChannels, NodeRef], bool] | None = None
    shift: Callable[[channels.ShiftedChannels, NodeRef], bool] | None = None
    turn: Callable[[Streams, NodeRef], bool] | None = None


RULES = {
    "Conv": OperatorRules(channels.scale_linear, channels.shift_linear, turns.turn_conv),
    "ConvTranspose": OperatorRules(channels.scale_linear, channels.shift_linear),
    "Gemm": OperatorRules(channels.scale_linear, channels.shift_linear, turns.turn_gemm),
    "MatMul": OperatorRules(channels.scale_linear, channels.shift_linear, turns.turn_matmul),
    "Add": OperatorRules(channels.scale_add, channels.shift_add, turns.turn_add),
    "Sub": OperatorRules(turn=turns.turn_add),
    "Sum": OperatorRules(turn=turns.turn_sum),
    "Mul": OperatorRules(channels.scale_product, None, turns.turn_product),
    "Div": OperatorRules(channels.scale_product, None, turns.turn_product),
    "Neg": OperatorRules(turn=turns.pass_stream),
    "Pow": OperatorRules(turn=turns.turn_power),
    # A ReLU right behind the maker of a tensor belongs to that: see `channels.shift_linear`.
    "Relu": OperatorRules(channels.pass_scales),
    "LeakyRelu": OperatorRules(channels.pass_scales),
    "PRelu": OperatorRules(channels.pass_scales),
    "Clip": OperatorRules(channels.scale_clip),
    "Identity": OperatorRules(channels.pass_scales, None, turns.pass_stream),
    "Dropout": OperatorRules(channels.pass_scales, None, turns.pass_stream),
    "Cast": OperatorRules(turn=turns.pass_stream),
    "MaxPool": OperatorRules(channels.pass_scales),
    "AveragePool": OperatorRules(channels.pass_scales),
    "GlobalMaxPool": OperatorRules(channels.pass_scales),
    # Of [N, tokens, channels] it is a mean over the channels.
    "GlobalAveragePool": OperatorRules(channels.pass_scales, None, turns.turn_mean),
    "Pad": OperatorRules(channels.scale_pad),
    "Resize": OperatorRules(channels.scale_resize),
    "Concat": OperatorRules(channels.scale_concat, None, turns.turn_concat),
    "Flatten": OperatorRules(channels.scale_flat, None, turns.turn_reshape),
    "Reshape": OperatorRules(channels.scale_flat, None, turns.turn_reshape),
    "Squeeze": OperatorRules(turn=turns.turn_reshape),
    "Unsqueeze": OperatorRules(turn=turns.turn_reshape),
    "Transpose": OperatorRules(turn=turns.turn_transpose),
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
    "LayerNormalization": OperatorRules(turn=turns.turn_normalized),
    "RMSNormalization": OperatorRules(turn=turns.turn_normalized),
    "SimplifiedLayerNormalization": OperatorRules(turn=turns.turn_normalized),
    "SkipLayerNormalization": OperatorRules(turn=turns.turn_normalized_sum),
    "SkipSimplifiedLayerNormalization": OperatorRules(turn=turns.turn_normalized_sum),
    "Attention": OperatorRules(turn=turns.turn_attention),
    "GroupQueryAttention": OperatorRules(turn=turns.turn_attention),
    "MultiHeadAttention": OperatorRules(turn=turns.turn_attention),
}


def find_scaled_channels(
    index: GraphIndex, fixed: Iterable[TensorId] = ()
) -> channels.ScaledChannels:
    """The channels of every scope that may be multiplied, and the weights that make and read them.

    fixed: tensors that keep their values.
    """
    flow = channels.ScaledChannels(index)
    flow.visit_nodes({name: rules.scale for name, rules in RULES.items()})
    for tensor in set(fixed) & flow.labels.keys():
        flow.hold_label(flow.labels[tensor], f"a rule gives the range of {tensor.name}")
    return flow.finish()


def find_shifted_channels(index: GraphIndex) -> channels.ShiftedChannels:
    """The tensors that may be lowered, with the layers that take the constants back."""
    flow = channels.ShiftedChannels(index)
    flow.visit_nodes({name: rules.shift for name, rules in RULES.items()})
    return flow


def find_streams(index: GraphIndex) -> Streams:
    """Every stream of the model, in the order the model runs in."""
    flow = Streams(index)
    flow.visit_nodes({name: rules.turn for name, rules in RULES.items()})
    return flow
