"""Branches and loops around products, sequences and optional values, parts in other types."""

import numpy as np
from onnx import TensorProto, helper

from tests.motifs.net import BOOL, FLOAT, INT64, MAP, TOKENS, Motif, Net, Value, floats, ints, named

HALF, DOUBLE, BFLOAT = TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16


def choose(net: Net, condition: str, *branches: Value) -> str:
    """An If of two linear layers of tokens."""
    then, other = (net.body(lambda inner, x=x: [(inner.linear(x, 8).name, FLOAT)]) for x in branches)
    return net.op("If", condition, then_branch=then, else_branch=other)


def branch_by_input(net: Net, x: Value) -> Value:
    condition = net.feed(BOOL, [], lambda rng: np.array(rng.random() < 0.5))
    return Value(choose(net, condition, x, x), (x.shape[0], 8))


def branch_never_taken(net: Net, x: Value) -> Value:
    condition = net.feed(BOOL, [1], lambda rng: np.array([True]))
    return Value(choose(net, condition, x, x), (x.shape[0], 8))


def branch_by_shape(net: Net, x: Value) -> Value:
    long = net.op("Greater", net.op("Squeeze", net.dims(x, 1, 2), ints(0)), np.array(5))
    return Value(choose(net, long, x, Value(net.op("Neg", x), x.shape)), (x.shape[0], 8))


def nested_branches(net: Net, x: Value) -> Value:
    condition = net.feed(BOOL, [], lambda rng: np.array(rng.random() < 0.5))

    def inner(body: Net) -> list[tuple[str, int]]:
        positive = body.op("Greater", body.reduce("ReduceMax", x, 0, 1, 2, keepdims=0), floats(0.1).reshape(()))
        return [(choose(body, positive, x, x), FLOAT)]

    other = net.body(lambda body: [(body.linear(x, 8).name, FLOAT)])
    return Value(net.op("If", condition, then_branch=net.body(inner), else_branch=other), (x.shape[0], 8))


def loop_of_products(net: Net, x: Value) -> Value:
    """A product applied three times, each time with a residual; all of them stacked are an output."""
    state, step, going = net.new("state"), net.new("step"), net.new("going")

    def body(inner: Net) -> list[tuple[str, int]]:
        product = inner.linear(Value(state, x.shape), x.shape[1])
        added = inner.op("Tanh", inner.op("Add", product, state))
        return [(inner.op("Identity", going), BOOL), (added, FLOAT), (inner.op("Identity", added), FLOAT)]

    graph = net.body(body, [(step, INT64), (going, BOOL), (state, FLOAT)])
    last, stacked = net.ops("Loop", 2, np.array(3), "", x, body=graph)
    net.give(stacked, FLOAT, [3, "N", *x.shape])
    return Value(last, x.shape)


def loop_until(net: Net, x: Value) -> Value:
    """How often is decided by the values."""
    state, step, going = net.new("state"), net.new("step"), net.new("going")

    def body(inner: Net) -> list[tuple[str, int]]:
        product = inner.op("Tanh", inner.linear(Value(state, x.shape), x.shape[1]))
        least = inner.reduce("ReduceMin", product, 0, 1, 2, keepdims=0)
        return [(inner.op("Less", least, floats(-0.5).reshape(())), BOOL), (product, FLOAT)]

    graph = net.body(body, [(step, INT64), (going, BOOL), (state, FLOAT)])
    return Value(net.op("Loop", np.array(4), np.array(True), x, body=graph), x.shape)


def scan_of_products(net: Net, x: Value) -> Value:
    """A recurrent cell over the tokens, written as Scan."""
    length, width = x.shape
    start = net.op("Mul", net.reduce("ReduceMean", x, 1, keepdims=0), floats(0.1))
    state, item = net.new("state"), net.new("item")

    def body(inner: Net) -> list[tuple[str, int]]:
        left, right = (inner.linear(Value(name, (width,)), width) for name in (state, item))
        cell = inner.op("Tanh", inner.op("Add", left, right))
        return [(cell, FLOAT), (inner.op("Identity", cell), FLOAT)]

    graph = net.body(body, [(state, FLOAT), (item, FLOAT)])
    axes = {"scan_input_axes": [1], "scan_output_axes": [1]}
    last, stacked = net.ops("Scan", 2, start, x, body=graph, num_scan_inputs=1, **axes)
    net.give(last)
    return Value(stacked, (length, width))


def scan_backwards(net: Net, x: Value) -> Value:
    """From the last token to the first, beside another sequence that goes forth; outputs in both orders."""
    length, width = x.shape
    other = net.linear(x, width)
    start = net.op("Mul", net.reduce("ReduceMax", x, 1, keepdims=0), floats(0.1))
    state, item, partner = (net.new(stem) for stem in ("state", "item", "partner"))

    def body(inner: Net) -> list[tuple[str, int]]:
        product = inner.linear(Value(item, (width,)), width)
        cell = inner.op("Tanh", inner.op("Add", inner.op("Add", product, state), partner))
        return [(cell, FLOAT), (inner.op("Identity", cell), FLOAT), (inner.op("Neg", cell), FLOAT)]

    graph = net.body(body, [(state, FLOAT), (item, FLOAT), (partner, FLOAT)])
    axes = {"scan_input_axes": [1, 1], "scan_output_axes": [1, 1]}
    ways = {"scan_input_directions": [1, 0], "scan_output_directions": [1, 0]}
    _, turned, straight = net.ops("Scan", 3, start, x, other, body=graph, num_scan_inputs=2, **axes, **ways)
    return Value(net.op("Concat", turned, straight, axis=2), (length, 2 * width))


def branch_in_loop(net: Net, x: Value) -> Value:
    """Even steps go one way, odd ones another."""
    state, step, going = net.new("state"), net.new("step"), net.new("going")

    def body(inner: Net) -> list[tuple[str, int]]:
        even = inner.op("Equal", inner.op("Mod", step, np.array(2)), np.array(0))
        value = Value(state, x.shape)
        branches = [inner.body(lambda deep: [(deep.linear(value, x.shape[1]).name, FLOAT)]) for _ in range(2)]
        chosen = inner.op("If", even, then_branch=branches[0], else_branch=branches[1])
        return [(inner.op("Identity", going), BOOL), (inner.op("Tanh", chosen), FLOAT)]

    graph = net.body(body, [(step, INT64), (going, BOOL), (state, FLOAT)])
    return Value(net.op("Loop", np.array(3), "", x, body=graph), x.shape)


def sequence_of_parts(net: Net, x: Value) -> Value:
    """Split into a sequence, its ends swapped, put together again."""
    first, second = (net.conv(x, 4) for _ in range(2))
    sequence = net.op("SequenceConstruct", first, second)
    parts = [net.op("SequenceAt", sequence, np.array(k)) for k in (1, 0)]
    return Value(net.op("Concat", *parts, axis=1), (8, *x.shape[1:]))


def split_to_sequence(net: Net, x: Value) -> Value:
    sequence = net.op("SplitToSequence", x, np.array(1), axis=1)
    longer = net.op("SequenceInsert", sequence, net.op("SequenceAt", sequence, np.array(0)))
    joined = net.op("ConcatFromSequence", longer, axis=1)
    return Value(joined, (x.shape[0] + 1, x.shape[1]))


def sequence_as_output(net: Net, x: Value) -> Value:
    name = net.op("SequenceConstruct", net.linear(x, 4), net.linear(x, 4))
    net.outputs.append(helper.make_tensor_sequence_value_info(name, FLOAT, None))
    return x


def loop_to_sequence(net: Net, x: Value) -> Value:
    """A loop that gathers a sequence."""
    state, step, going = net.new("state"), net.new("step"), net.new("going")
    empty = net.op("SequenceEmpty", dtype=FLOAT)

    def body(inner: Net) -> list[tuple[str, int]]:
        row = inner.op("Gather", x, step, axis=1)
        product = inner.linear(Value(inner.op("Unsqueeze", row, ints(1)), (1, x.shape[1])), 8)
        return [(inner.op("Identity", going), BOOL), (inner.op("SequenceInsert", state, product), FLOAT)]

    graph = net.body(body, [(step, INT64), (going, BOOL), (state, FLOAT)])
    for value, name in ((graph.input[2], state), (graph.output[1], graph.output[1].name)):
        value.CopyFrom(helper.make_tensor_sequence_value_info(name, FLOAT, None))
    sequence = net.op("Loop", np.array(x.shape[0]), "", empty, body=graph)
    return Value(net.op("ConcatFromSequence", sequence, axis=1), (x.shape[0], 8))


def optional_value(net: Net, x: Value) -> Value:
    optional = net.op("Optional", net.linear(x, 8))
    return Value(net.op("OptionalGetElement", optional), (x.shape[0], 8))


def optional_given(net: Net, x: Value) -> Value:
    """Asked for, and taken in a branch."""
    optional = net.op("Optional", net.linear(x, 8))
    there = net.op("OptionalHasElement", optional)
    branches = [
        net.body(lambda inner: [(inner.op("OptionalGetElement", optional), FLOAT)]),
        net.body(lambda inner: [(inner.linear(x, 8).name, FLOAT)]),
    ]
    return Value(net.op("If", there, then_branch=branches[0], else_branch=branches[1]), (x.shape[0], 8))


def optional_input(net: Net, x: Value) -> Value:
    tensor = helper.make_tensor_type_proto(FLOAT, ["N", *x.shape])
    name = net.feed(FLOAT, [], lambda rng: rng.standard_normal((1, *x.shape)).astype("f4"))
    net.inputs[-1].type.CopyFrom(helper.make_optional_type_proto(tensor))
    return Value(net.op("Add", net.linear(x, x.shape[1]), net.op("OptionalGetElement", name)), x.shape)


def optional_output(net: Net, x: Value) -> Value:
    name = net.op("Optional", net.linear(x, 4))
    kind = helper.make_tensor_type_proto(FLOAT, ["N", x.shape[0], 4])
    net.outputs.append(helper.make_value_info(name, helper.make_optional_type_proto(kind)))
    return x


def computed_in(net: Net, x: Value, kind: int, dtype: str | type) -> Value:
    """Two products in another float type."""
    narrow = net.op("Cast", x, to=kind)
    inner = net.op("MatMul", narrow, net.weight(x.shape[1], 8, fan=x.shape[1]).astype(dtype))
    outer = net.op("MatMul", net.op("Tanh", inner), net.weight(8, 8).astype(dtype))
    return Value(net.op("Cast", outer, to=FLOAT), (x.shape[0], 8))


half_part = named("half_part", computed_in, HALF, "f2")
double_part = named("double_part", computed_in, DOUBLE, "f8")


def brain_float_part(net: Net, x: Value) -> Value:
    import ml_dtypes

    return computed_in(net, x, *((FLOAT, "f4") if net.runnable else (BFLOAT, ml_dtypes.bfloat16)))


def brain_float_weight(net: Net, x: Value) -> Value:
    """A weight stored in bfloat16, and activations that pass through it."""
    import ml_dtypes

    weight = net.op("Cast", net.weight(x.shape[1], 8, fan=x.shape[1]).astype(ml_dtypes.bfloat16), to=FLOAT)
    passed = net.op("Cast", net.op("Cast", x, to=BFLOAT), to=FLOAT)
    return Value(net.op("MatMul", passed, weight), (x.shape[0], 8))


def half_convolutions(net: Net, x: Value) -> Value:
    """A block in float16, its input cast there and back."""
    narrow = net.op("Cast", x, to=HALF)
    conv = net.op("Conv", narrow, net.weight(8, x.shape[0], 3, 3).astype("f2"), pads=[1, 1, 1, 1])
    outer = net.op("Conv", net.op("Relu", conv), net.weight(8, 8, 1, 1).astype("f2"), net.around(8).astype("f2"))
    return Value(net.op("Cast", outer, to=FLOAT), (8, *x.shape[1:]))


def half_weight(net: Net, x: Value) -> Value:
    weight = net.op("Cast", net.weight(8, x.shape[0], 3, 3).astype("f2"), to=FLOAT)
    return Value(net.op("Conv", x, weight, pads=[1, 1, 1, 1]), (8, *x.shape[1:]))


def half_input(net: Net, x: Value) -> Value:
    name = net.feed(HALF, ["N", 1, 1, 1], lambda rng: rng.standard_normal((1, 1, 1, 1)).astype("f2"))
    return Value(net.op("Add", net.conv(x, 8, 3), net.op("Cast", name, to=FLOAT)), (8, *x.shape[1:]))


def half_output(net: Net, x: Value) -> Value:
    net.give(net.op("Cast", net.conv(x, 4), to=HALF), HALF)
    return x


def image_input(net: Net, x: Value) -> Value:
    """Bytes with the channels last, normalized in the graph."""
    side = x.shape[1:]
    name = net.feed(
        TensorProto.UINT8, ["N", *side, 3], lambda rng: rng.integers(0, 256, (1, *side, 3)).astype(np.uint8)
    )
    image = net.op("Transpose", net.op("Cast", name, to=FLOAT), perm=[0, 3, 1, 2])
    scaled = net.op(
        "Div", net.op("Sub", image, floats(124, 116, 104).reshape(3, 1, 1)), floats(58, 57, 57).reshape(3, 1, 1)
    )
    return Value(net.op("Add", net.conv(Value(scaled, (3, *side)), x.shape[0], 3), x), x.shape)


def unsigned_input(net: Net, x: Value) -> Value:
    """Positions in a type that few operators take."""
    shift = net.feed(TensorProto.UINT32, ["N", 1, 1, 1], lambda rng: rng.integers(0, 3, (1, 1, 1, 1)).astype(np.uint32))
    return Value(net.op("Add", net.conv(x, 8), net.op("Cast", shift, to=FLOAT)), (8, *x.shape[1:]))


def hard_choice(net: Net, x: Value) -> Value:
    """An output with a 1 at each greatest value."""
    name = net.op("Hardmax", net.linear(x, 4), axis=-1)
    net.give(name)
    return Value(name, (x.shape[0], 4))


def spectrum(net: Net, x: Value) -> Value:
    """The squared magnitudes of a Fourier transform over the tokens."""
    length, width = x.shape
    wide = net.op("Unsqueeze", x, ints(3))
    inputs = (wide, "", np.array(1)) if net.opset >= 20 else (wide,)
    complex_ = net.op("DFT", *inputs, **({} if net.opset >= 20 else {"axis": 1}))
    power = net.reduce("ReduceSumSquare", complex_, 3, keepdims=0)
    return Value(net.op("Log", net.op("Add", power, floats(0.1))), (length, width))


def empty_part(net: Net, x: Value) -> Value:
    """A tensor without elements, beside others."""
    none = net.op("Slice", x, ints(0), ints(0), ints(1))
    return Value(net.op("Concat", none, net.conv(x, 8, 3), axis=1), (8, *x.shape[1:]))


def empty_product(net: Net, x: Value) -> Value:
    """A product of no rows."""
    none = net.op("Slice", x, ints(0), ints(0), ints(1))
    inner = net.linear(Value(none, (0, x.shape[1])), x.shape[1])
    return Value(net.op("Concat", inner, x, axis=1), x.shape)


def scalar_input(net: Net, x: Value) -> Value:
    """A diffusion model's time step: one integer, its sines, a product."""
    step = net.feed(INT64, ["N"], lambda rng: rng.integers(0, 1000, 1))
    angle = net.op("Mul", net.op("Unsqueeze", net.op("Cast", step, to=FLOAT), ints(1)), floats(1, 0.1, 0.01, 0.001))
    both = net.op("Concat", net.op("Sin", angle), net.op("Cos", angle), axis=1)
    shift = net.op("Gemm", both, net.weight(x.shape[0], 8), net.around(x.shape[0]), transB=1)
    return Value(net.op("Add", x, net.op("Unsqueeze", shift, ints(2, 3))), x.shape)


def dropout(net: Net, x: Value) -> Value:
    return Value(net.op("Dropout", net.op("Identity", x), floats(0.5).reshape(()), np.array(False)), x.shape)


MOTIFS = (
    *(Motif(build, TOKENS) for build in (
        branch_by_input, branch_never_taken, nested_branches, loop_of_products, loop_until, half_part, double_part,
        empty_product, hard_choice,
    )),
    *(Motif(build, MAP) for build in (
        half_weight, half_input, half_output, image_input, unsigned_input, empty_part,
        scalar_input, dropout,
    )),
    Motif(branch_by_shape, TOKENS, 9), Motif(scan_of_products, TOKENS, 9), Motif(split_to_sequence, TOKENS, 11),
    Motif(sequence_as_output, TOKENS, 11), Motif(sequence_of_parts, MAP, 11), Motif(loop_to_sequence, TOKENS, 13),
    Motif(brain_float_weight, TOKENS, 13), Motif(optional_value, TOKENS, 15, runs=27), Motif(spectrum, TOKENS, 17),
    Motif(scan_backwards, TOKENS, 9), Motif(branch_in_loop, TOKENS, 10), Motif(half_convolutions, MAP),
    Motif(optional_given, TOKENS, 15, runs=27), Motif(optional_output, TOKENS, 15, runs=27),
    Motif(optional_input, TOKENS, 15, runs=27), Motif(brain_float_part, TOKENS, 13, runs=0),
)  # fmt: skip
