"""Products of every form, gates, experts, and recurrent layers."""

import numpy as np

from tests.motifs.net import FLOAT, MAP, TOKENS, Motif, Net, Value, floats, ints, named


def einsum_weight(net: Net, x: Value) -> Value:
    weight = net.weight(x.shape[-1], 2, 4, fan=x.shape[-1])
    heads = net.op("Einsum", x, weight, equation="btd,dhk->bhtk")
    turned = net.op("Transpose", heads, perm=[0, 2, 1, 3])
    return Value(net.op("Reshape", turned, ints(0, x.shape[0], 8)), (x.shape[0], 8))


def einsum_attention(net: Net, x: Value) -> Value:
    query, key = net.linear(x, 8), net.linear(x, 8)
    scores = net.op("Softmax", net.op("Einsum", query, key, equation="bid,bjd->bij"), axis=-1)
    return Value(net.op("Einsum", scores, x, equation="bij,b j d->bid"), x.shape)


def einsum_ellipsis(net: Net, x: Value) -> Value:
    weight = net.weight(8, x.shape[-1])
    return Value(net.op("Einsum", x, weight, equation="...d,ed->...e"), (x.shape[0], 8))


def einsum_bilinear(net: Net, x: Value) -> Value:
    weight = net.weight(x.shape[-1], x.shape[-1])
    left = net.op("Einsum", x, weight, equation="btd,de->bte")
    scores = net.op("Einsum", left, x, equation="bte,bse->bts")
    return Value(net.op("Tanh", scores), (x.shape[0], x.shape[0]))


def swiglu(net: Net, x: Value) -> Value:
    gate, up = net.linear(x, 16), net.linear(x, 16)
    silu = net.op("Mul", gate.name, net.op("Sigmoid", gate.name))
    return net.linear(Value(net.op("Mul", silu, up.name), gate.shape), x.shape[-1])


def geglu_of_one_product(net: Net, x: Value) -> Value:
    both = net.linear(x, 32)
    gate, up = net.ops("Split", 2, both, ints(16, 16), axis=-1)
    erf = net.op("Erf", net.op("Div", gate, floats(2**0.5)))
    gelu = net.op("Mul", net.op("Mul", gate, net.op("Add", erf, floats(1))), floats(0.5))
    return net.linear(Value(net.op("Mul", gelu, up), (x.shape[0], 16)), x.shape[-1])


def gelu_by_tanh(net: Net, x: Value) -> Value:
    inner = net.linear(x, 16)
    return net.linear(Value(net.op("Gelu", inner, approximate="tanh"), inner.shape), x.shape[-1])


def gated_by_swish(net: Net, x: Value) -> Value:
    """The operator of opset 24."""
    gate, up = net.linear(x, 16), net.linear(x, 16)
    return net.linear(Value(net.op("Mul", net.op("Swish", gate, alpha=1.5), up.name), gate.shape), x.shape[-1])


def mish_between(net: Net, x: Value) -> Value:
    inner = net.conv(x, 8, 3)
    return net.conv(Value(net.op("Mish", inner), inner.shape), 8)


def rarer_activations(net: Net, x: Value) -> Value:
    """Functions of opset 9 and before."""
    names = [net.op(kind, net.linear(x, 8)) for kind in ("Shrink", "Sinh", "Atan", "Sign", "Floor", "Exp", "Erf")]
    names.append(net.op("LogSoftmax", net.linear(x, 8), axis=2))
    return Value(net.op("Tanh", net.op("Sum", *names)), (x.shape[0], 8))


def activations(net: Net, x: Value) -> Value:
    """One branch of each function, added up."""
    names = []
    for kind in ("HardSwish", "Softplus", "Elu", "Selu", "Celu", "Softsign", "ThresholdedRelu", "Abs", "Sin"):
        names.append(net.op(kind, net.linear(x, 8)))
    names.append(net.op("PRelu", net.linear(x, 8), net.around(8)))
    return Value(net.op("Sum", *names), (x.shape[0], 8))


def experts(net: Net, x: Value) -> Value:
    """A mixture of four, all computed; the gates of the two best, by TopK, weigh them."""
    width = x.shape[-1]
    gates = net.op("Softmax", net.linear(x, 4), axis=-1)
    values, indices = net.ops("TopK", 2, gates, ints(2), axis=-1)
    weights = net.op("ScatterElements", net.op("Mul", gates, floats(0)), indices, values, axis=-1)
    inner = net.op("Unsqueeze", x, ints(1))
    hidden = net.op("Relu", net.op("MatMul", inner, net.weight(4, width, 8, fan=width)))
    each = net.op("MatMul", hidden, net.weight(4, 8, width, fan=8))
    share = net.op("Unsqueeze", net.op("Transpose", weights, perm=[0, 2, 1]), ints(3))
    return Value(net.reduce("ReduceSum", net.op("Mul", each, share), 1, keepdims=0), x.shape)


def low_rank(net: Net, x: Value) -> Value:
    """A product with an adapter beside it."""
    main = net.linear(x, 8)
    adapter = net.linear(net.linear(x, 2), 8)
    return Value(net.op("Add", main, net.op("Mul", adapter, floats(0.5))), main.shape)


def stored_on_the_left(net: Net, x: Value) -> Value:
    """MLP-Mixer: a stored matrix mixes the tokens from the left."""
    length = x.shape[0]
    return Value(net.op("MatMul", net.weight(length, length), x), x.shape)


def turned_weight(net: Net, x: Value) -> Value:
    weight = net.op("Transpose", net.weight(8, x.shape[-1]), perm=[1, 0])
    return Value(net.op("Add", net.op("MatMul", x, weight), net.around(8)), (x.shape[0], 8))


def gemm_forms(net: Net, x: Value) -> Value:
    """Rows of all tokens; alpha, beta and biases of a row, a column and one number."""
    length, width = x.shape
    rows = net.op("Reshape", x, ints(-1, width))
    one = net.op("Gemm", rows, net.weight(8, width), net.around(8), transB=1, alpha=0.5, beta=2.0)
    two = net.op("Gemm", one, net.weight(8, 8), floats(0.25).reshape(1, 1))
    three = net.op("Gemm", two, net.weight(8, 8), transA=0)
    return Value(net.op("Reshape", three, ints(-1, length, 8)), (length, 8))


def gemm_of_turned_rows(net: Net, x: Value) -> Value:
    """A stored matrix that is turned, on the left of activations: a batch of one."""
    length, width = x.shape
    rows = net.op("Reshape", x, ints(length, width))
    name = net.op("Gemm", net.weight(length, length), rows, transA=1)
    return Value(net.op("Reshape", name, ints(1, length, width)), x.shape)


def vector_product(net: Net, x: Value) -> Value:
    """A vector on the right, and its outer product with another."""
    scores = net.op("MatMul", x, net.weight(x.shape[-1], fan=x.shape[-1]))
    column = net.op("Unsqueeze", scores, ints(2))
    return Value(net.op("MatMul", column, net.weight(1, 8)), (x.shape[0], 8))


def tied_weight(net: Net, x: Value) -> Value:
    """Into and out of a width by one matrix, which is also a table."""
    table = net.name(net.weight(x.shape[-1], 8))
    inner = net.op("Relu", net.op("MatMul", x, table))
    rows = net.op("Gather", table, ints(*(k % x.shape[-1] for k in range(x.shape[0]))), axis=0)
    mixed = net.op("Add", inner, rows)
    return Value(net.op("MatMul", mixed, net.op("Transpose", table, perm=[1, 0])), x.shape)


def integer_product(net: Net, x: Value) -> Value:
    """A dynamic int8 product that is there already."""
    width = x.shape[-1]
    codes, scale, zero = net.ops("DynamicQuantizeLinear", 3, x)
    weight = net.rng.integers(-127, 128, (width, 8)).astype(np.int8)
    product = net.op("Cast", net.op("MatMulInteger", codes, weight, zero), to=FLOAT)
    factor = net.op("Mul", scale, floats(0.01))
    return Value(net.op("Mul", product, factor), (x.shape[0], 8))


def paired_product(net: Net, x: Value) -> Value:
    """Pairs of another tool are there already."""
    pair = (floats(0.05).reshape(()), np.array(128, np.uint8))
    inner = net.op("DequantizeLinear", net.op("QuantizeLinear", x, *pair), *pair)
    weight = net.rng.integers(-127, 128, (x.shape[-1], 8)).astype(np.int8)
    stored = net.op("DequantizeLinear", weight, floats(0.005).reshape(()), np.array(0, np.int8))
    return Value(net.op("MatMul", inner, stored), (x.shape[0], 8))


def recurrent(net: Net, x: Value, kind: str, gates: int, direction: str, *more: object, **attributes: object) -> Value:
    """A recurrent layer over the tokens; its last state is an output. more: inputs behind the bias."""
    length, width = x.shape
    ways = 2 if direction == "bidirectional" else 1
    turned = net.op("Transpose", x, perm=[1, 0, 2])
    weights = net.weight(ways, 4 * gates, width, fan=width), net.weight(ways, 4 * gates, 4, fan=4)
    bias = net.around(ways * 8 * gates).reshape(ways, -1)
    outputs = net.ops(kind, 3 if kind == "LSTM" else 2, turned, *weights, bias, *more, hidden_size=4,
                      direction=direction, **attributes)  # fmt: skip
    net.give(outputs[1])
    back = net.op("Transpose", outputs[0], perm=[2, 0, 1, 3])
    return Value(net.op("Reshape", back, ints(0, length, ways * 4)), (length, ways * 4))


lstm = named("lstm", recurrent, "LSTM", 4, "forward")
lstm_reverse = named("lstm_reverse", recurrent, "LSTM", 4, "reverse")
lstm_both_ways = named("lstm_both_ways", recurrent, "LSTM", 4, "bidirectional")
gru = named("gru", recurrent, "GRU", 3, "forward", linear_before_reset=1)
gru_reverse = named("gru_reverse", recurrent, "GRU", 3, "reverse", activations=["HardSigmoid", "Softsign"])
gru_both_ways = named("gru_both_ways", recurrent, "GRU", 3, "bidirectional", linear_before_reset=0)
elman = named("elman", recurrent, "RNN", 1, "bidirectional", activations=["Tanh", "Relu"])


def lstm_of_lengths(net: Net, x: Value) -> Value:
    """Both ways over sequences of their own lengths, cells clipped."""
    lengths = net.feed(6, ["N"], lambda rng: rng.integers(1, x.shape[0] + 1, 1).astype(np.int32))
    return recurrent(net, x, "LSTM", 4, "bidirectional", lengths, clip=1.0)


def lstm_of_layers(net: Net, x: Value) -> Value:
    """Two layers, the outputs of one the inputs of the other."""
    inner = recurrent(net, x, "LSTM", 4, "forward")
    return recurrent(net, Value(net.op("Dropout", inner), inner.shape), "LSTM", 4, "reverse", input_forget=0)


def lstm_of_states(net: Net, x: Value) -> Value:
    """The states come as inputs, so that the batch has one item."""
    states = [net.feed(FLOAT, [1, 1, 4], lambda rng: rng.standard_normal((1, 1, 4)).astype("f4")) for _ in range(2)]
    peepholes = net.weight(1, 12, fan=4)
    return recurrent(net, x, "LSTM", 4, "forward", "", *states, peepholes)


def gru_of_lengths(net: Net, x: Value) -> Value:
    """Padded sequences: the length of each is an input."""
    lengths = net.feed(6, ["N"], lambda rng: rng.integers(1, x.shape[0] + 1, 1).astype(np.int32))
    return recurrent(net, x, "GRU", 3, "reverse", lengths)


def highway(net: Net, x: Value) -> Value:
    gate = net.op("Sigmoid", net.linear(x, x.shape[-1]))
    inner = net.op("Relu", net.linear(x, x.shape[-1]))
    carried = net.op("Mul", x, net.op("Sub", floats(1), gate))
    return Value(net.op("Add", net.op("Mul", inner, gate), carried), x.shape)


def gated_maps(net: Net, x: Value) -> Value:
    """The halves of the channels, one the gate of the other."""
    both = net.conv(x, 16, 3)
    left = net.op("Slice", both, ints(0), ints(8), ints(1))
    right = net.op("Slice", both, ints(8), ints(16), ints(1), ints(1))
    return Value(net.op("Mul", left, net.op("Sigmoid", right)), (8, *x.shape[1:]))


MOTIFS = (
    *(Motif(build, TOKENS) for build in (
        swiglu, low_rank, stored_on_the_left, turned_weight, gemm_forms, gemm_of_turned_rows, vector_product,
        tied_weight, lstm, lstm_reverse, lstm_both_ways, lstm_of_lengths, lstm_of_layers, lstm_of_states, gru,
        gru_reverse, gru_both_ways, gru_of_lengths, elman, highway,
    )),
    *(Motif(build, TOKENS, 12) for build in (einsum_weight, einsum_attention, einsum_ellipsis, einsum_bilinear)),
    Motif(geglu_of_one_product, TOKENS, 9), Motif(gated_maps, MAP, 10), Motif(paired_product, TOKENS, 10, runs=27),
    Motif(experts, TOKENS, 11), Motif(integer_product, TOKENS, 11), Motif(activations, TOKENS, 14),
    Motif(gelu_by_tanh, TOKENS, 20),
    Motif(rarer_activations, TOKENS, 9), Motif(mish_between, MAP, 18), Motif(gated_by_swish, TOKENS, 24, 24),
)  # fmt: skip
