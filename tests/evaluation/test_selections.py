"""Where a float model chooses by computed values, another model is judged on the same choices, row by row."""

import math
from collections.abc import Mapping
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from onnx import ModelProto, numpy_helper

from onnxq.data import load_data
from onnxq.errors import ModelError
from onnxq.evaluation.agreement import AgreementSums, ChoiceAgreement, find_class_scores
from onnxq.evaluation.compare import FloatOutputs, MatchedRunner, ReferenceRunner, compare_models
from onnxq.evaluation.segments import compare_segments
from onnxq.evaluation.selections import Selection, Selections, explain_missing, find_selections, name_own
from onnxq.evaluation.toggled import measure_settings, toggle_model
from onnxq.evaluation.trials import Switchboard, TrialModel, measure_each, measure_models
from onnxq.graph import GraphIndex, infer_shapes, inline_functions, name_nodes, strip_weights
from onnxq.progress import silent
from onnxq.runtime import Session
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers
from tests.evaluation.selecting import HEADS, PLAIN, network, samples
from tests.graph.shape_nets import ShapeNet, shape_nets
from tests.networks import parse_text
from tests.passes.kit import parse, read_by

Array = np.ndarray
NOISE = 0.02
# What each network goes by: the operators, the values in front of them, the outputs behind.
FOUND = {
    "detector": [("TopK", ("flat",), ("out",))],
    "suppression": [("NonMaxSuppression", ("boxes", "by_class"), ("out",))],
    "threshold": [("Greater", ("flat",), ("out",))],
    "labels": [("ArgMax", ("logits",), ("out", "label", "number"))],
    "queries": [("TopK", ("flat",), ("out", "label")), ("TopK", ("classes",), ("out", "label"))],
    "experts": [("TopK", ("router",), ("out",))],
    "fused_experts": [("TopK", ("tokens",), ("out",))],
    "branch": [("TopK", ("flat",), ("out",)), ("TopK", ("sums",), ("out",))],
    "loop": [("TopK", ("flat",), ("out",))],
    "scan": [("ArgMax", ("logits",), ("out", "label"))],
}


def measure(proto: ModelProto, other: ModelProto) -> tuple[dict[str, float], tuple[ChoiceAgreement, ...]]:
    """SQNR by judged tensor, and the agreement."""
    reference = ReferenceRunner(proto, optimize=False, threads=1)
    runner = MatchedRunner(reference, Session(reference.selections.take_choices(other), optimize=False, threads=1))
    rows = [{"x": row[None]} for row in samples()["x"]]
    found = compare_models({"": (reference, runner)}, rows)[""].results()
    return {one.name: one.sqnr_db for one in found}, runner.agreement.results()


def run_free(proto: ModelProto, other: ModelProto) -> float:
    """SQNR of the worst output, each model with its own choices."""
    rows = [{"x": row[None]} for row in samples()["x"]]
    sessions = [Session(model, optimize=False, threads=1) for model in (proto, other)]
    return min(one.sqnr_db for one in compare_models({"": (sessions[0], sessions[1])}, rows)[""].results())


@pytest.mark.parametrize("name", HEADS)
def test_selections_of_a_network(name: str) -> None:
    proto = network(name)
    found = find_selections(proto)
    values = [tuple(value.split(" in front of ")[0] for value, _ in one.values) for one in found.nodes]
    assert [(one.op_type, names, one.outputs) for one, names in zip(found.nodes, values, strict=True)] == FOUND[name]
    assert found.settled == {"labels": {"label", "number"}, "queries": {"label"}, "scan": {"label"}}.get(name, set())
    light = strip_weights(proto)
    assert find_selections(light) == found
    assert find_selections(light) is find_selections(light)


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_changes_for_a_network_that_does_not_choose(name: str) -> None:
    proto = network(name)
    found = find_selections(proto)
    assert found == Selections()
    assert found.expose_choices(proto) is proto
    assert found.take_choices(proto) is proto
    feeds = samples(1)
    assert found.add_choices(feeds, {}) is feeds


@pytest.mark.parametrize("name", HEADS)
def test_a_model_on_its_own_choices_is_itself(name: str) -> None:
    proto = network(name)
    found = find_selections(proto)
    exposed = Session(found.expose_choices(proto), optimize=False, threads=1)
    taking = Session(found.take_choices(proto), optimize=False, threads=1)
    # Its nodes have names of their own, by which roundings are put behind switches.
    assert GraphIndex(found.take_choices(proto)).nodes
    for row in samples()["x"]:
        feeds = {"x": row[None]}
        plain, outputs = Session(proto, optimize=False, threads=1).run(feeds), exposed.run(feeds)
        again = taking.run(found.add_choices(feeds, outputs))
        assert all(np.array_equal(outputs[output], value) for output, value in plain.items())
        assert plain.keys() - again.keys() == found.settled
        assert all(np.array_equal(again[output], plain[output]) for output in plain.keys() & again.keys())
        assert all(np.array_equal(again[name_own(one.name)], outputs[one.name]) for one in found.nodes)
    # The empty vector of a branch that does not run has no rank of the choice, so that none is declared.
    if not any(one.scope for one in found.nodes):
        onnx.checker.check_model(found.take_choices(proto))


@pytest.mark.parametrize("name", HEADS)
def test_rounding_is_told_by_the_rows_that_match(name: str) -> None:
    """Weights 34 dB from exact: the outputs are lost where rows change places, and near where they match."""
    proto, other = network(name), network(name, NOISE)
    assert run_free(proto, other) < 15
    judged, agreement = measure(proto, other)
    assert set(judged) == {
        *(value for one in find_selections(proto).nodes for value, _ in one.values),
        *({value.name for value in proto.graph.output} - find_selections(proto).settled),
    }
    # No sample reaches the other branch.
    assert all(20 < db < 45 for value, db in judged.items() if ".else_branch" not in value)
    assert [one.op for one in agreement] == [op for op, _, _ in FOUND[name]][: 1 if name == "branch" else None]
    assert all(0.9 * one.chosen < one.shared < one.chosen for one in agreement)


@pytest.mark.parametrize(
    ("name", "broken", "lost"),
    [
        ("detector", {"w_score": 0.2 * np.ones((16, 1), np.float32)}, "flat in front of best/TopK"),
        ("detector", {"w_box": 0.2 * np.ones((16, 4), np.float32)}, "out"),
        ("suppression", {"w_box": 0.2 * np.ones((16, 4), np.float32)}, "boxes in front of kept/NonMaxSuppression"),
        ("threshold", {"w_score": 0.2 * np.ones((16, 1), np.float32)}, "flat in front of sure/Greater"),
        ("labels", {"w_class": np.eye(16, dtype=np.float32)}, "logits in front of label/ArgMax"),
        ("queries", {"w_box": 0.2 * np.ones((16, 4), np.float32)}, "out"),
        ("experts", {"w_expert": 0.2 * np.ones((16, 16, 16), np.float32)}, "out"),
    ],
)
def test_what_is_broken_is_told(name: str, broken: Mapping[str, Array], lost: str) -> None:
    judged, _ = measure(network(name), network(name, **broken))
    assert judged[lost] < 10


def test_a_score_that_is_an_output_too_is_judged_once() -> None:
    proto = network("labels")
    proto.graph.output.append(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, 96, 16]))
    judged, _ = measure(proto, network_with(proto, NOISE))
    assert sorted(judged) == ["logits", "out"]


def network_with(proto: ModelProto, noise: float) -> ModelProto:
    """The same network with noise in its weights."""
    other, rng = ModelProto.FromString(proto.SerializeToString()), np.random.default_rng(3)
    for tensor in other.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.dtype == np.float32 and value.ndim:
            value = (value * (1 + noise * rng.standard_normal(value.shape))).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return other


RNG = np.random.default_rng(5)
SQUARE = RNG.standard_normal((16, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("graph", "op", "settled"),
    [
        # The place of each maximum, and the values there again.
        ("""(float[1, 16, 16] x) => (float[1, 1, 16, 16] out) {
            m = MatMul(x, w) four = Unsqueeze(m, zero)
            high, at = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (four)
            out = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (high, at) }""", "MaxPool", set()),
        ("(float[1, 16, 16] x) => (float[1, 16, 16] out) { m = MatMul(x, w) h = Hardmax(m) out = MatMul(h, w) }",
         "Hardmax", set()),
        ("(float[1, 16, 16] x) => (bool[1, 16, 16] out) { m = MatMul(x, w) out = GreaterOrEqual(m, bound) }",
         "GreaterOrEqual", {"out"}),
        # A length that the network predicts.
        ("""(float[1, 16, 16] x) => (float[K, 16] out) {
            m = MatMul(x, w) sum = ReduceMax <keepdims = 0> (m) count = Cast <to = 7> (sum)
            end = Unsqueeze(count, zero) rows = Squeeze(m, zero) out = Slice(rows, zero, end, zero) }""",
         "Cast", set()),
        ("""(float[1, 16, 16] x) => (float[K, 16] out) {
            m = MatMul(x, w) flat = Squeeze(m, zero) sum = ReduceSum <keepdims = 0> (flat, one) sure = Less(sum, bound)
            out = Compress <axis = 0> (flat, sure) }""", "Less", set()),
    ],
)  # fmt: skip
def test_other_operators_that_choose(graph: str, op: str, settled: set[str]) -> None:
    weights = {"w": SQUARE, "zero": np.array([0]), "one": np.array([1]), "bound": np.array(0.25, np.float32)}
    proto = parse(f"g {graph}", **read_by(graph, weights))
    found = find_selections(proto)
    assert [one.op_type for one in found.nodes] == [op]
    assert found.settled == settled
    other = network_with(proto, NOISE)
    reference = ReferenceRunner(proto, threads=1)
    runner = MatchedRunner(reference, Session(found.take_choices(other), threads=1))
    rows = [{"x": row} for row in RNG.standard_normal((6, 1, 16, 16)).astype(np.float32)]
    assert min(one.sqnr_db for one in compare_models({"": (reference, runner)}, rows)[""].results()) > 20
    (choice,) = runner.agreement.results()
    assert 0.8 * choice.chosen < choice.shared <= choice.chosen


def test_numbers_rounded_to_integers_are_no_choice() -> None:
    """An image of bytes is judged as it comes."""
    graph = "g (float[1, 16, 16] x) => (uint8[1, 16, 16] out) { m = MatMul(x, w) out = Cast <to = 2> (m) }"
    assert find_selections(parse(graph, w=SQUARE)) == Selections()


@pytest.mark.parametrize(("start", "chooses"), [("Cast <to=1>(i)", False), ("Exp(x)", True)])
def test_counting_in_floats_is_no_choice(start: str, chooses: bool) -> None:
    text = f"""g (float[4] x, int64[4] i) => (float[4] y) <float one = {{1}}> {{
        counted = {start} next = Add(counted, one) k = Cast <to=7>(next) y = Gather(x, k) }}"""
    assert bool(find_selections(parse(text)).nodes) == chooses


def test_a_choice_that_no_output_depends_on_is_none() -> None:
    """Labels of the parts of a voting classifier (skl2onnx), which loading takes out: other models do not make them."""
    graph = """g (float[1, 16, 16] x) => (float[1, 16, 16] out, int64[1, 1, 16] label) {
        m = MatMul(x, w) best = ArgMax <axis = 1> (m) named = Cast <to = 6> (best) out = Relu(m)
        label = ArgMax <axis = 1> (out) }"""
    assert [one.node for one in find_selections(parse(graph, w=SQUARE)).nodes] == ["label/ArgMax"]


def test_choices_inside_functions_are_found_where_the_function_runs() -> None:
    text = """g (float[1, 16, 16] x) => (float[1, 4, 16] out) <int64[1] four = {4}, int64[3] shape = {1, 4, 16}>
    { m = MatMul(x, w) out = own.pick (m, four, shape) }
    <domain: "own", opset_import: ["" : 17]> pick (m, four, shape) => (out) {
        score = ReduceMean <axes = [2], keepdims = 1> (m) best, at = TopK <axis = 1> (score, four)
        places = Expand(at, shape) out = GatherElements <axis = 1> (m, places) }"""
    named = name_nodes(parse_text(text, "own", w=SQUARE))
    found = find_selections(named)
    assert [one.op_type for one in found.nodes] == ["TopK"]
    feeds = {"x": RNG.standard_normal((1, 16, 16)).astype(np.float32)}
    outputs = Session(found.expose_choices(named), threads=1).run(feeds)
    taking = found.take_choices(network_with(inline_functions(named), NOISE))
    again = Session(taking, threads=1).run(found.add_choices(feeds, outputs))
    assert np.abs(again["out"] - outputs["out"]).max() < 0.2 * np.abs(outputs["out"]).max()


def test_a_choice_that_the_other_model_lacks_is_its_own() -> None:
    """Another tool's names: outputs are compared as they come."""
    proto, other = network("detector"), network("detector", NOISE)
    for node in other.graph.node:
        node.input[:] = [f"{name}_" if name == "at" else name for name in node.input]
        node.output[:] = [f"{name}_" if name == "at" else name for name in node.output]
    found = find_selections(proto)
    assert [one.node for one in found.list_missing(other)] == ["best/TopK"]
    assert found.list_missing(network("detector", NOISE)) == ()
    judged, agreement = measure(proto, other)
    assert judged == {"out": pytest.approx(run_free(proto, other))}
    assert agreement == ()


# Bodies that choose, by the reason why their choice is not followed; "" where it is.
BODIES = {
    "since its size may be another one in each iteration of a Loop": """
        all = Squeeze(f, zero) sums = ReduceMax <axes = [2], keepdims = 0> (f)
        out = Loop (count, yes) <body = pick (int64 i, bool go) => (bool again, float[16] rows) {
            again = Identity(go) boxes = MatMul(f, w_box) score = Unsqueeze(sums, one)
            kept = NonMaxSuppression(boxes, score, twelve, level, level) column = Slice(kept, last, three, one)
            flat = Squeeze(column, one) picked = Gather(all, flat) rows = ReduceSum <keepdims = 0> (picked, zero)
        }>""",
    "since it is made in some iterations of a Loop only": """
        out = Loop (count, yes) <body = pick (int64 i, bool go) => (bool again, float[1, 12] rows) {
            again = Identity(go) first = Cast <to = 9> (i)
            rows = If (first) <then_branch = one_way () => (float[1, 12] best) {
                sums = ReduceSum <keepdims = 0> (f, last) other, at = TopK <axis = 1> (sums, twelve)
                best = GatherElements <axis = 1> (sums, at)
            }, else_branch = other_way () => (float[1, 12] best) {
                sums = ReduceMax <keepdims = 0, axes = [2]> (f) best, at = TopK <axis = 1> (sums, twelve)
            }>
        }>""",
    # What is kept from the iterations before grows, and with it the number of rows that have a best class.
    "since its size may be another one in each iteration of a Loop ": """
        none = Slice(f, zero, zero, one)
        grown, out = Loop (count, yes, none) <body = pick (int64 i, bool go, float[1, N, 16] seen)
            => (bool again, float[1, M, 16] more, float[16] rows) {
            again = Identity(go) more = Concat <axis = 1> (seen, f) label = ArgMax <axis = 2, keepdims = 0> (more)
            taken = Gather(w_class, label) rows = ReduceSum <keepdims = 0> (taken, planes)
        }>""",
    "": """
        length = Shape(x) size = ReduceProd <keepdims = 0> (length) some = Cast <to = 9> (size)
        out = If (some) <then_branch = both () => (float[2, 12] values) {
            values = Loop (count, yes) <body = pick (int64 i, bool go) => (bool again, float[12] rows) {
                again = Identity(go) sums = ReduceSum <keepdims = 0> (f, ends)
                other, at = TopK <axis = 0> (sums, twelve) rows = Gather(sums, at)
            }>
        }, else_branch = neither () => (float[2, 12] values) { values = Expand(level, wide) }>""",
}


# Some exporters declare the number of the iteration as a vector of one, as Paddle's does.
@pytest.mark.parametrize("counter", ["int64 i", "int64[1] i"])
@pytest.mark.parametrize("reason", BODIES)
def test_a_choice_of_iterations_is_followed_where_it_is_one_tensor(reason: str, counter: str) -> None:
    numbers = {"zero": [0], "one": [1], "last": [2], "ends": [0, 2], "twelve": [12], "planes": [0, 1], "three": [3]}
    numbers |= {"wide": [2, 12]}
    arrays = {key: np.array(value, np.int64) for key, value in numbers.items()}
    arrays |= {"count": np.array(2), "yes": np.array(True), "level": np.float32(0.5), "w_class": SQUARE, "w": SQUARE}
    arrays["w_box"] = SQUARE[:, :4]
    body = BODIES[reason].replace("int64 i", counter)
    text = f"g (float[1, 96, 16] x) => (float[A] out) {{ f = MatMul(x, w) {body} }}"
    proto = parse(text, **read_by(text, arrays))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    found = find_selections(proto)
    assert {one.obstacle for one in found.own} == ({reason.strip()} if reason else set())
    assert all(one.outputs == ("out",) for one in (*found.nodes, *found.own))
    assert [f"not taken from the float model, {reason.strip()}" in explain_missing(one) for one in found.own] == [
        True for _ in found.own
    ]
    assert found.list_missing(proto) == found.own
    judged, agreement = measure(proto, network_with(proto, NOISE))
    assert len(agreement) == len(found.nodes) == int(not reason)
    assert all(one.share > 0.8 for one in agreement)
    assert reason or judged["out"] > 25


@pytest.mark.parametrize("body", [
    "best, at = TopK <axis = 1> (m, three) out = Gather <axis = 0> (w, at)",
    # One number chosen in an If, whose other branch could give nothing from opset 11 on.
    """some = Cast <to = 9> (one) best = Relu(m) out = If (some) <then_branch = a () => (float[4, 16] v) {
        most = ReduceMax <keepdims = 0> (m) high = Greater(most, one)
        v = If (high) <then_branch = b () => (float[4, 16] c) { c = Identity(m) },
            else_branch = d () => (float[4, 16] e) { e = Neg(m) }>
    }, else_branch = f () => (float[4, 16] g) { g = Neg(m) }>""",
])  # fmt: skip
def test_models_older_than_operators_that_others_need_run_all_the_same(body: str) -> None:
    text = f"""g (float[4, 16] x) => (float[4, A] best, float[4, B, C] out) <int64[1] three = {{3}}, float one = {{1}}>
    {{ m = MatMul(x, w) {body} }}"""
    named = name_nodes(parse_text(text, opset=10, ir=7, w=SQUARE))
    found = find_selections(named)
    feeds = {"x": RNG.standard_normal((4, 16)).astype(np.float32)}
    outputs = Session(found.expose_choices(named), threads=1).run(feeds)
    again = Session(found.take_choices(named), threads=1).run(found.add_choices(feeds, outputs))
    assert all(np.array_equal(again[name], outputs[name]) for name in ("best", "out"))


def quantized(proto: ModelProto) -> ModelProto:
    """The weights of a network in int8 pairs."""
    other = ModelProto.FromString(proto.SerializeToString())
    for tensor in list(other.graph.initializer):
        value = numpy_helper.to_array(tensor)
        if value.dtype != np.float32 or value.ndim < 2:
            continue
        scale = np.float32(np.abs(value).max() / 20)
        parts = {"q": np.round(value / scale).astype(np.int8), "s": scale, "z": np.zeros((), np.int8)}
        names = [f"{tensor.name}_{end}" for end in parts]
        other.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", names, [tensor.name], f"{tensor.name}_d"))
        held = zip(names, parts.values(), strict=True)
        other.graph.initializer.extend(numpy_helper.from_array(np.asarray(part), name) for name, part in held)
        other.graph.initializer.remove(tensor)
    return other


@pytest.mark.parametrize("name", ["detector", "queries", "experts"])
def test_all_judges_agree(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials, trials in pieces, switches, and segments: the same figures, those of the model on float's choices."""
    proto = network(name)
    other = quantized(proto)
    judged, _ = measure(proto, other)
    assert min(judged.values()) > 12
    floats = FloatOutputs(proto, load_data(dict(samples()), GraphIndex(proto).inputs), threads=1)
    models = [TrialModel(other), TrialModel(other, fuse_pairs=True)]
    pieces = Crew(Workers(Journal(tmp_path)))
    with silent("") as task:
        found = [*measure_models(models, floats, Crew(), task), *measure_models(models, floats, pieces, task, pieces=2)]
        each = measure_each(models[0], floats, Crew(), task)
    toggled = toggle_model(proto, other, threads=1)
    everything = frozenset(toggled.switches)
    off, on = measure_settings(toggled, floats, [frozenset(), everything], progress=silent)
    many = [everything - {one} for one in toggled.switches] + [frozenset({one}) for one in toggled.switches]
    ways = [measure_settings(toggled, floats, many, progress=silent, crew=crew) for crew in (None, pieces)]
    assert repr([one.results() for one in ways[0]]) == repr([one.results() for one in ways[1]])
    # Where ONNX Runtime refuses constants, the switches stay inputs.
    monkeypatch.setattr(Switchboard, "fix_switches", Mock(side_effect=ModelError(name, "has other sizes")))
    whole = measure_settings(toggled, floats, many, progress=silent)
    assert [one.worst_db() for one in whole] == pytest.approx([one.worst_db() for one in ways[0]], abs=1.0)
    for errors in (*found, on):
        assert {one.name: one.sqnr_db for one in errors.results()} == pytest.approx(judged, abs=0.05)
    assert len(each) == 8
    assert off.worst_db() > 100


def test_segments_take_the_choices_made_in_them_and_before() -> None:
    proto = network("queries")
    rows = [{"x": row[None]} for row in samples(3)["x"]]
    agreement = AgreementSums(find_selections(proto))
    found = compare_segments(proto, quantized(proto), rows, limit=1, agreement=agreement, threads=1)
    assert len(found) > 2
    figures = {one.name: one.sqnr_db for segment in found for one in segment.off.results()}
    assert {"flat in front of best/TopK", "classes in front of top/TopK", "out"} <= figures.keys()
    assert min(figures.values()) > 15
    assert not any(name.endswith("/own") for name in figures)
    assert [one.chosen for one in agreement.results()] == [12, 6]
    assert not any(math.isinf(one.shared) for one in agreement.results())


@pytest.mark.recent_ort
@settings(max_examples=15, deadline=None)
@given(shape_nets())
def test_segments_carry_sizes_ranks_and_sequences(net: ShapeNet) -> None:
    model = net.model()
    agreement = AgreementSums(find_selections(model))
    found = compare_segments(model, model, net.feeds((8, 8), (6, 11)), limit=1, agreement=agreement)
    assert min(errors.off.worst_db() for errors in found) == math.inf
    assert min(errors.on.worst_db() for errors in found) > 90


def count(op: str, choice: object, own: object, axis: int = -1) -> tuple[float, float]:
    """(chosen, shared) of one sample."""
    inputs = (("v", 1), ("i", 7)) if op == "TopK" else (("i", 7),)
    one = Selection("node", op, inputs, (("x in front of node", 0),), axis)
    sums = AgreementSums(Selections((one,)))
    outputs = {name_own("i"): np.array(own), "y": np.zeros(1)}
    sums.update({"i": np.array(choice)}, outputs)
    # Nothing else compares a choice.
    assert outputs.keys() == {"y"}
    (found,) = sums.results()
    assert (found.node, found.op, found.values) == ("node", op, ("x in front of node",))
    return found.chosen, found.shared


@pytest.mark.parametrize(
    ("op", "choice", "own", "axis", "figures"),
    [
        ("TopK", [[3, 1, 2], [0, 1, 2]], [[1, 3, 5], [2, 1, 0]], -1, (3, 2.5)),
        # Along another axis, columns are the choices.
        ("TopK", [[3, 0], [1, 1]], [[1, 0], [3, 2]], 0, (2, 1.5)),
        ("ArgMax", [[1, 2], [0, 0]], [[1, 2], [0, 3]], 1, (1, 0.75)),
        ("NonMaxSuppression", [[0, 1, 5], [0, 0, 5]], [[0, 0, 5], [0, 0, 6], [0, 2, 5]], -1, (3, 1)),
        ("NonZero", [[0, 1], [4, 5]], [[0, 0, 1], [4, 5, 5]], -1, (3, 2)),
        ("Greater", [[True, False], [True, True]], [[True, True], [False, True]], -1, (3, 2)),
        # The condition of a branch that float does not take.
        ("Greater", False, True, -1, (1, 0)),
        ("Hardmax", [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], -1, (2, 1)),
        ("Cast", 3, 4, -1, (1, 0)),
        ("NonMaxSuppression", np.zeros((0, 3), np.int64), [[0, 0, 6]], -1, (1, 0)),
        ("TopK", np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int64), -1, (0, 0)),
    ],
)
def test_items_of_a_choice(op: str, choice: object, own: object, axis: int, figures: tuple[float, float]) -> None:
    assert count(op, choice, own, axis) == figures


def test_samples_are_added_up_and_a_choice_without_counterpart_is_left_out() -> None:
    one, other = (Selection(name, "ArgMax", ((name, 7),), ()) for name in "ab")
    sums = AgreementSums(Selections((one, other), frozenset({"y"})))
    for own in (1, 1, 1, 2):
        sums.update({"a": np.array([1]), "b": np.array([1])}, {name_own("a"): np.array([own])})
    assert [(found.node, found.chosen, found.shared) for found in sums.results()] == [("a", 1, 0.75)]


# ---- Outputs that look like scores of classes: by name, by Softmax, and perhaps where a product makes them.


@pytest.mark.parametrize(("body", "found"), [
    ("(float[N,8] x, float[8,4] w) => (float[N,4] logits) { logits = MatMul(x, w) }", {"logits": True}),
    ("(float[N,8] x, float[8,4] w) => (float[N,4] y) { y = MatMul(x, w) }", {"y": False}),
    ("(float[N,8] x, float[8,4] w, float[4] b) => (float[N,4] y) { h = MatMul(x, w) y = Add(h, b) }", {"y": False}),
    ("(float[N,8] x, float[8,4] w) => (float[N,4] y) { h = MatMul(x, w) s = Softmax(h) y = Identity(s) }",
     {"y": True}),
    ("(float[N,8,4] x) => (float[N,8,4] y) { y = Softmax <axis=1>(x) }", {}),
    ("(float[N,5,8] x, float[8,4] w) => (float[N,5,4] Logits) { Logits = MatMul(x, w) }", {"Logits": True}),
    # Classes on axis 1, in front of time.
    ("(float[N,8,T] x, float[4,8,1] w) => (float[N,4,T] logits) { h = Conv(x, w) logits = Identity(h) }", {}),
    ("(float[N,8,4] x) => (float[N,8,4] probs) { probs = Softmax <axis=1>(x) }", {}),
    # Hidden states, a picture, one number, a label.
    ("(float[N,5,8] x, float[8,4] w) => (float[N,5,4] y) { y = MatMul(x, w) }", {}),
    ("(float[N,4,8,8] x) => (float[N,4,8,8] logits) { logits = Relu(x) }", {}),
    ("(float[N,8] x, float[8,1] w) => (float[N,1] score) { score = MatMul(x, w) }", {}),
    ("(float[N,8] x) => (int64[N] classes) { classes = ArgMax <axis=1, keepdims=0>(x) }", {}),
    ("(float[N,8] x, float[N,8] z) => (float[N,8] y) { y = Add(x, z) }", {}),
])  # fmt: skip
def test_outputs_that_look_like_scores_of_classes(body: str, found: dict[str, bool]) -> None:
    assert find_class_scores(GraphIndex(infer_shapes(name_nodes(parse_text(f"g {body}"))))) == found
