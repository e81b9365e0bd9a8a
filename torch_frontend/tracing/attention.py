"""torch's transformer modules in a form that can be traced: the same products, one by one.

Their own forward tests types, shapes and modes to choose a fused path, which a tracer cannot follow. The parameters
stay in place: `in_proj_weight` is read as one weight, or sliced where query, key and value differ.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from torch_frontend.qmodules import Call, copy_shallowly, register_qmodule, register_targets
from torch_frontend.tracing.modules import name_arguments, read_stack


class NotTraceable(Exception):
    """This call of the module has no traceable form; it becomes a leaf."""


def attention_bias(
    like: Tensor, heads: int, attn_mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Sum of the masks, to be added to the scores [N, heads, L, S]; None without masks.

    -inf where a boolean mask is True, a float mask as it is. attn_mask: [L, S] or [N * heads, L, S]. padding: [N, S].
    like: gives the dtype.
    """
    total = None
    for mask in (attn_mask, padding):
        if mask is None:
            continue
        bias = mask.to(like.dtype)
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill(mask, float("-inf"))
        if mask is padding:
            # [N, S] to [N, 1, 1, S].
            bias = bias[..., None, None, :]
        elif mask.dim() == 3:
            # [N * heads, L, S] to [N, heads, L, S].
            bias = bias.unflatten(0, (-1, heads))
        total = bias if total is None else total + bias
    return total


@register_qmodule(attention_bias, op="float")
class AttentionBias(Call):
    """The sum of attention's masks as one call, which stays float."""


def _read_parameter(like: Any, module: nn.Module, name: str) -> Any:
    """Proxy of a module's parameter, or None. like: any proxy of the trace."""
    if module._parameters.get(name) is None:
        return None
    path = like.tracer.path_of_module(module)
    return like.tracer.create_proxy("get_attr", f"{path}.{name}" if path else name, (), {})


def _project_inputs(m: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value behind their linear projections."""
    bias = _read_parameter(query, m, "in_proj_bias")
    size = m.embed_dim
    if m._qkv_same_embed_dim:
        weight = _read_parameter(query, m, "in_proj_weight")
        # Self-attention: one product, with the packed weight as one site.
        if query is key and key is value:
            packed = functional.linear(query, weight, bias).chunk(3, -1)
            return packed[0], packed[1], packed[2]
        parts = [weight[k * size : (k + 1) * size] for k in range(3)]
    else:
        parts = [_read_parameter(query, m, f"{name}_proj_weight") for name in "qkv"]
    biases = [None if bias is None else bias[k * size : (k + 1) * size] for k in range(3)]
    q, k, v = (
        functional.linear(x, w, b)
        for x, w, b in zip((query, key, value), parts, biases, strict=True)
    )
    return q, k, v


def run_multihead_attention(
    m: Any,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Forward of nn.MultiheadAttention for [N, L, E] (batch_first) or [L, N, E].

    is_causal: ignored; for torch too it is a hint about attn_mask. Raises NotTraceable for bias_k, bias_v and
    add_zero_attn.
    """
    if m.bias_k is not None or m.bias_v is not None or m.add_zero_attn:
        raise NotTraceable("bias_k, bias_v and add_zero_attn are not taken apart")
    if not m.batch_first:
        # The same proxy again, so that self-attention is still recognized.
        same = query is key and key is value
        query = query.transpose(0, 1)
        key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
    q, k, v = _project_inputs(m, query, key, value)
    heads = (m.num_heads, m.head_dim)
    # [N, L, E] to [N, heads, L, E / heads].
    q, k, v = (x.unflatten(-1, heads).transpose(-3, -2) for x in (q, k, v))
    bias = None
    if attn_mask is not None or key_padding_mask is not None:
        bias = q.tracer.create_proxy(
            "call_function", attention_bias, (q, m.num_heads, attn_mask, key_padding_mask), {}
        )
    weights = None
    # The fused product gives no weights, and its dropout would not follow the mode in a graph.
    if need_weights or m.dropout > 0:
        # As in torch the query is scaled, not the scores.
        scores = torch.matmul(q * (1.0 / math.sqrt(m.head_dim)), k.transpose(-2, -1))
        scores = scores if bias is None else scores + bias
        weights = torch.softmax(scores, -1)
        weights = functional.dropout(weights, m.dropout, m.training) if m.dropout > 0 else weights
        out = torch.matmul(weights, v)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    out = m.out_proj(out.transpose(-3, -2).flatten(-2))
    out = out if m.batch_first else out.transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(-3) if average_attn_weights else weights


def run_encoder_layer(
    m: Any,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    """Forward of nn.TransformerEncoderLayer."""
    if m.norm_first:
        x = src + m._sa_block(m.norm1(src), src_mask, src_key_padding_mask)
        return x + m._ff_block(m.norm2(x))
    x = m.norm1(src + m._sa_block(src, src_mask, src_key_padding_mask))
    return m.norm2(x + m._ff_block(x))


def run_encoder(
    m: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    """Forward of nn.TransformerEncoder."""
    # torch's own forward may turn padded batches into nested tensors, which ONNX does not have.
    for layer in m.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return src if m.norm is None else m.norm(src)


def run_decoder(
    m: Any,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: Any = None,
    memory_is_causal: bool = False,
) -> Any:
    """Forward of nn.TransformerDecoder."""
    masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    for layer in m.layers:
        tgt = layer(tgt, memory, *masks)
    return tgt if m.norm is None else m.norm(tgt)


def run_transformer(
    m: Any,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    src_is_causal: Any = None,
    tgt_is_causal: Any = None,
    memory_is_causal: bool = False,
) -> Any:
    """Forward of nn.Transformer."""
    memory = m.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask)
    masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    return m.decoder(tgt, memory, *masks)


class AttentionDropout(nn.Module):
    """F.scaled_dot_product_attention whose dropout follows the mode, train or eval."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As the function."""
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, **options
        )


register_targets(AttentionDropout, op="attention")


def take_apart(model: fx.GraphModule) -> None:
    """Replace F.scaled_dot_product_attention by its products, where it has no mask, dropout or heads that share keys.

    Engines quantize attention as a whole: query, key, softmax, value and result, which are then sites of their own.
    """
    graph = model.graph
    for node in list(graph.nodes):
        if node.target is not functional.scaled_dot_product_attention:
            continue
        arguments = name_arguments(
            node,
            "query",
            "key",
            "value",
            "attn_mask",
            "dropout_p",
            "is_causal",
            "scale",
            "enable_gqa",
        )
        scale = arguments.pop("scale", None)
        query, key, value = map(arguments.pop, ("query", "key", "value"))
        # Masked scores stay float, so the op stays whole.
        if arguments.pop("attn_mask", None) is not None or any(arguments.values()):
            continue
        with graph.inserting_before(node):
            # The op's default, 1 / sqrt(E), for any size of E.
            if scale is None:
                size = graph.call_method("size", (query, -1))
                scale = graph.call_function(operator.pow, (size, -0.5))
            scaled = graph.call_function(torch.mul, (query, scale))
            transposed = graph.call_method("transpose", (key, -2, -1))
            scores = graph.call_function(torch.matmul, (scaled, transposed))
            weights = graph.call_function(torch.softmax, (scores, -1))
            result = graph.call_function(torch.matmul, (weights, value))
        # The scope, after which the new calls are named.
        for call in (scaled, transposed, scores, weights, result):
            call.meta["nn_module_stack"] = read_stack(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def make_traceable(model: nn.Module) -> nn.Module:
    """The model itself; for one of torch's transformer modules a copy whose forward is the traceable form."""
    # Inner modules get their form in Tracer.call_module; the root's forward is called by fx directly.
    form = TRACEABLE_FORMS.get(type(model))
    if form is None:
        return model
    copy = copy_shallowly(model)
    # A subclass under the same name, so that isinstance and messages stay as they are.
    copy.__class__ = type(type(model).__name__, (type(model),), {"forward": form})
    return copy


TRACEABLE_FORMS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: run_multihead_attention,
    nn.TransformerEncoderLayer: run_encoder_layer,
    # Its own forward can be traced.
    nn.TransformerDecoderLayer: nn.TransformerDecoderLayer.forward,
    nn.TransformerEncoder: run_encoder,
    nn.TransformerDecoder: run_decoder,
    nn.Transformer: run_transformer,
}
