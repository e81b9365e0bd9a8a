"""DynamicQuantizeLSTM in numpy: input and hidden state on scales of their own values, weights as stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from tests.cpus.kernels import Array, Multiply, multiply_exactly
from tests.numerics.reference import quantize_dynamic


def multiply_dynamic(x: Array, weight: Array, scale: Array, multiply: Multiply) -> Array:
    """Floats [rows, K] times stored integers [K, N], rows quantized together on one scale."""
    data, numbers = quantize_dynamic(x)
    sums = multiply(data, weight) - int(numbers.zero_point) * weight.astype(np.int64).sum(axis=0)
    return np.asarray(sums.astype(np.float32) * (numbers.scale * scale), np.float32)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def run_direction(
    x: Array,
    weights: Sequence[tuple[Array, Array]],
    bias: Array,
    state: tuple[Array, Array],
    peepholes: Array,
    lengths: Array,
    *,
    coupled: bool,
    multiply: Multiply,
) -> tuple[Array, Array, Array]:
    """Every hidden state [steps, batch, H], the last one and the last cell state of one direction.

    x: [steps, batch, features]. weights: (integers [K, 4 H], scales) of input and hidden state; gates in ONNX's order
    i, o, f, c. bias: [4 H]. peepholes: [3, H] for i, o, f. lengths: steps of each sequence. coupled: f is 1 - i.
    """
    steps, batch, features = x.shape
    (hidden, cell), previous = state, state[0]
    longest = int(lengths.max())
    # Steps that no sequence has are not read.
    gates = multiply_dynamic(x[:longest].reshape(-1, features), *weights[0], multiply).reshape(longest, batch, -1)
    found = np.zeros((steps, batch, hidden.shape[1]), np.float32)
    for step in range(longest):
        both = gates[step] + multiply_dynamic(previous, *weights[1], multiply) + bias
        i, o, f, c = np.split(both, 4, axis=1)
        i = sigmoid(i + peepholes[0] * cell)
        f = 1 - i if coupled else sigmoid(f + peepholes[2] * cell)
        new = f * cell + i * np.tanh(c)
        made = sigmoid(o + peepholes[1] * new) * np.tanh(new)
        alive = (step < lengths)[:, None]
        cell, hidden = np.where(alive, new, cell), np.where(alive, made, hidden).astype(np.float32)
        # The kernel reads on from what it wrote, and the scale is that of all sequences.
        found[step] = previous = np.where(alive, made, 0).astype(np.float32)
    return found, hidden, np.asarray(cell, np.float32)


def run_lstm(
    model: ModelProto, node: NodeProto, feeds: Mapping[str, Array], multiply: Multiply = multiply_exactly
) -> list[Array]:
    """Y, Y_h and Y_c of a DynamicQuantizeLSTM with the usual activations and no clip, as ONNX has them."""
    constants = {value.name: numpy_helper.to_array(value) for value in model.graph.initializer}
    attrs: dict[str, Any] = {one.name: one.s.decode() if one.s else one.i for one in node.attribute}
    x, w, r, b, lengths, h, c, p, ws, _, rs, _ = (
        {**constants, **feeds}.get(name) for name in [*node.input, *[""] * (12 - len(node.input))]
    )
    assert x is not None and w is not None and r is not None and ws is not None and rs is not None  # noqa: PT018
    steps, batch, size = x.shape[0], x.shape[1], int(attrs["hidden_size"])
    lengths = np.full(batch, steps) if lengths is None else lengths
    back = [at for one in lengths for at in [*range(one)[::-1], *range(one, steps)]]
    turn = np.reshape(back, (batch, steps)).T, np.arange(batch)
    kind = attrs.get("direction", "forward")
    found = []
    for at, reverse in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[kind]):
        none = np.zeros((batch, size), np.float32)
        y, *last = run_direction(
            x[turn] if reverse else x,
            [(w[at], ws[at]), (r[at], rs[at])],
            0 if b is None else b[at].reshape(2, -1).sum(axis=0),
            (none if h is None else h[at], none if c is None else c[at]),
            np.zeros((3, size)) if p is None else p[at].reshape(3, -1),
            lengths,
            coupled=bool(attrs.get("input_forget", 0)),
            multiply=multiply,
        )
        found.append((y[turn] if reverse else y, *last))
    return [np.stack([one[0] for one in found], axis=1), *(np.stack([one[k] for one in found]) for k in (1, 2))]
