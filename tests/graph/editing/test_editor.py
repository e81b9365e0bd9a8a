"""Editor: what graphsurgeon would lose is kept, edits reach every scope and keep the numbers, nonsense is refused."""

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

from onnxq.errors import ModelError
from onnxq.graph import Editor, GraphIndex, name_nodes, verify_graph
from onnxq.graph.values import encode_tensor
from onnxq.sites import Edge, TensorId
from tests.graph.kit import assert_same, branches, compute, model, models, shuffled

F = np.float32


def loaded() -> ModelProto:
    """Everything graphsurgeon drops or cannot export, in one model with an If and a function."""
    proto = model(
        """g (float[4] x, float[4] z, bool c) => (float[4] y) {
        [a] a = Relu(x) [f] f = loc.F(a) [q] q = QuantizeLinear(f, s, zp) [d] d = DequantizeLinear(q, s, zp)
        [if] y = If(c) <then_branch = t () => (float[4] b) { [n] b = Add(d, w) },
                        else_branch = e () => (float[4] b) { [m] b = Add(z, d) }>
    }
    <domain: "loc", opset_import: ["": 17]> F (a) => (b) { [inner] b = Neg(a) }""",
        s=F(0.5), zp=np.uint8(3), w=np.ones(4, F), unused=np.zeros(4, F),
        four=encode_tensor("four", np.array([1, -2, 3], np.int8), TensorProto.INT4),
        eight=encode_tensor("eight", np.array([1, 2]), TensorProto.FLOAT8E4M3FN),
    )  # fmt: skip
    proto.doc_string, proto.model_version, proto.domain = "about", 7, "here"
    proto.graph.doc_string = "the graph"
    for holder in (proto, proto.graph, proto.graph.node[0], proto.graph.initializer[0], proto.functions[0].node[0]):
        holder.metadata_props.add(key="k", value="v")
    proto.graph.node[0].doc_string = "a node"
    body = proto.graph.node[-1].attribute[0].g
    body.metadata_props.add(key="body", value="v")
    body.node[0].metadata_props.add(key="inner", value="v")
    body.value_info.append(helper.make_tensor_value_info("d", TensorProto.FLOAT, [4]))
    annotation = proto.graph.quantization_annotation.add(tensor_name="f")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")
    proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["four"]))
    proto.graph.input[0].doc_string = "an input"
    return proto


@pytest.fixture
def editor() -> Editor:
    return Editor(branches())


def test_an_export_without_edits_gives_the_same_model() -> None:
    proto = loaded()
    assert Editor(proto).export() == proto


def test_attributes_graphsurgeon_cannot_export_survive() -> None:
    proto = model("g (float[4] x) => (float[4] y) { [n] y = Relu(x) }")
    node = helper.make_node("Op", ["x"], ["t"], "odd", domain="any")
    node.attribute.append(helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT, [1])))
    values = helper.make_tensor("v", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
    node.attribute.append(helper.make_attribute("sparse", helper.make_sparse_tensor(values, indices, [4])))
    node.attribute.add(name="empty", type=6)
    node.attribute.append(helper.make_attribute("raw", b"\xff\x00"))
    proto.graph.node.append(node)
    proto.opset_import.append(helper.make_opsetid("any", 1))
    assert Editor(proto).export() == proto


def test_edits_keep_what_graphsurgeon_drops() -> None:
    proto = loaded()
    editor = Editor(proto)
    editor.insert_node("", "Neg", ["a"], ["a2"], name="new", after="a", metadata={"why": "test"})
    editor.rewire(TensorId("a"), "a2")
    editor.rename_tensor(TensorId("f"), "f2")
    editor.model_metadata({"onnxq.plan": "{}"})
    result = editor.export()
    checker.check_model(result)
    by_name = {node.name: node for node in result.graph.node}
    assert [node.name for node in result.graph.node] == ["a", "new", "f", "q", "d", "if"]
    assert by_name["a"].doc_string == "a node"
    assert {p.key: p.value for p in by_name["a"].metadata_props} == {"k": "v"}
    assert {p.key: p.value for p in by_name["new"].metadata_props} == {"why": "test"}
    assert {p.key: p.value for p in result.metadata_props} == {"k": "v", "onnxq.plan": "{}"}
    assert result.graph.quantization_annotation[0].tensor_name == "f2"
    assert list(result.functions) == list(proto.functions)
    assert list(result.graph.initializer) == list(proto.graph.initializer)
    assert by_name["if"] == proto.graph.node[-1]


def test_the_model_given_is_not_changed() -> None:
    proto = branches()
    before = proto.SerializeToString(deterministic=True)
    editor = Editor(proto)
    editor.rename_tensor(TensorId("a"), "b2")
    editor.rename_tensor(TensorId("w"), "w2")
    editor.replace_initializer(TensorId("w2"), np.zeros(4, F))
    editor.set_op("up", "Neg")
    editor.remove_unused()
    editor.export()
    assert proto.SerializeToString(deterministic=True) == before


def test_sibling_tensors_of_one_name_are_edited_apart(editor: Editor) -> None:
    editor.rename_tensor(TensorId("k", "if.else_branch"), "other")
    index = GraphIndex(editor.export())
    assert index.find_node("n2").inputs == ("k", "w")
    assert index.find_node("n4").inputs == ("other", "z")


def test_a_body_that_gives_out_an_outer_tensor_follows_its_renaming() -> None:
    proto = model("""g (float[4] x, float[4] z, bool c) => (float[4] y) {
        [r] a = Relu(x)
        [i] y = If(c) <then_branch = t () => (float[4] a) { }, else_branch = e () => (float[4] b) { [n] b = Neg(z) }>
    }""")
    editor = Editor(proto)
    editor.rename_tensor(TensorId("a"), "renamed")
    assert GraphIndex(editor.export()).scope_outputs("i.then_branch") == ("renamed",)
    editor.remove_unused()
    assert {node.name for node in GraphIndex(editor.export()).nodes} == {"r", "i", "n"}


def test_the_nodes_that_make_the_new_tensor_go_on_reading_the_old_one(editor: Editor) -> None:
    editor.insert_node("", "Neg", ["a"], ["m"], name="m1")
    editor.insert_node("", "Add", ["m", "a"], ["a2"], name="m2")
    editor.rewire(TensorId("a"), "a2")
    assert {edge.node for edge in GraphIndex(editor.export()).list_consumers(TensorId("a"))} == {"m1", "m2"}


def test_equal_unnamed_looking_nodes_are_not_mixed_up() -> None:
    """graphsurgeon compares nodes by content: clearing one must not unlink its twin."""
    text = "g (float[4] x) => (float[4] y) { a = Relu(x) b = Relu(x) p = Neg(a) q = Neg(b) y = Add(p, q) }"
    proto = name_nodes(model(text))
    editor = Editor(proto)
    editor.replace_input(Edge("y/Add", 1), "p")
    editor.remove_node("q/Neg")
    editor.remove_node("b/Relu")
    result = editor.export()
    assert [node.name for node in result.graph.node] == ["a/Relu", "p/Neg", "y/Add"]
    np.testing.assert_array_equal(compute(result)[0], 2 * compute(proto)[0] / 2)


def test_a_removed_nodes_tensor_can_be_made_anew(editor: Editor) -> None:
    editor.remove_node("up")
    with pytest.raises(ModelError, match="'a', which nothing makes"):
        editor.export()
    editor.insert_node("", "Max", ["x", "z"], ["a"], name="instead")
    result = editor.export()
    verify_graph(result)
    assert result.graph.node[0].name == "instead"


def test_a_node_without_an_anchor_stands_before_its_reader(editor: Editor) -> None:
    editor.insert_node("", "Neg", ["z"], ["z2"], name="late")
    editor.rewire(TensorId("z"), "z2")
    assert [node.name for node in editor.export().graph.node] == ["up", "late", "if", "end"]


def test_anchors_of_anchors_and_removed_anchors_hold(editor: Editor) -> None:
    editor.insert_node("", "Neg", ["a"], ["p"], name="p", after="up")
    editor.insert_node("", "Neg", ["p"], ["q"], name="q", after="p")
    editor.insert_node("", "Neg", ["x"], ["o"], name="o", before="up")
    editor.remove_node("p")
    editor.replace_input(Edge("q", 0), "o")
    assert [node.name for node in editor.export().graph.node] == ["o", "up", "q", "if", "end"]


def test_fresh_names_meet_nothing_in_any_scope() -> None:
    proto = branches()
    proto.graph.value_info.append(helper.make_tensor_value_info("ghost", TensorProto.FLOAT, [4]))
    editor = Editor(proto)
    assert editor.fresh("free") == "free"
    assert editor.fresh("free") == "free_1"
    for taken in ("k", "n3", "w", "ghost", "if", "y"):
        assert editor.fresh(taken) == f"{taken}_1"


def test_a_users_initializer_is_never_taken_for_ours() -> None:
    """A model with an initializer called like a scale would otherwise lend it its value."""
    proto = branches()
    proto.graph.initializer.append(numpy_helper.from_array(np.array(9, F), "a/scale"))
    editor = Editor(proto)
    with pytest.raises(ModelError, match="there is a tensor of this name"):
        editor.add_initializer("", "a/scale", np.array(1, F))
    assert editor.add_initializer("", editor.fresh("a/scale"), np.array(1, F)) == "a/scale_1"


@pytest.mark.parametrize(("dtype", "values"), [(TensorProto.INT4, [-8, 7, 3]), (TensorProto.UINT4, [15, 0, 9, 1])])
def test_sub_byte_initializers_run_in_ort(dtype: int, values: list[int]) -> None:
    editor = Editor(model("g (float[4] x) => (float[N] y) { [n] y = Neg(u) [u] u = Relu(x) }", opset=21, ir=10))
    editor.add_initializer("", "w", np.array(values), dtype=dtype)
    editor.add_initializer("", "s", np.array(0.5, F))
    editor.insert_node("", "DequantizeLinear", ["w", "s"], ["wf"], name="dq", before="n")
    editor.rewire(TensorId("u"), "wf")
    result = editor.export()
    np.testing.assert_array_equal(compute(result)[0], -0.5 * np.array(values, F))
    # Again through the editor: graphsurgeon alone fails on what was touched.
    array = GraphIndex(Editor(result).export()).find_constant(TensorId("w"))
    np.testing.assert_array_equal(array.astype(np.int8), values)


def test_bfloat16_initializers_are_stored_as_such(editor: Editor) -> None:
    editor.add_initializer("", "half", np.array([1.5, -2.0], ml_dtypes.bfloat16))
    tensor = editor.export().graph.initializer[-1]
    assert tensor.data_type == TensorProto.BFLOAT16
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(F), [1.5, -2.0])


def test_unused_things_go_in_every_scope() -> None:
    proto = branches()
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(4, F), "dead_w"))
    proto.graph.node.append(helper.make_node("Add", ["x", "dead_w"], ["dead"], "dead"))
    body = proto.graph.node[1].attribute[0].g
    body.node.append(helper.make_node("Neg", ["a"], ["dead2"], "dead2"))
    body.initializer.append(numpy_helper.from_array(np.ones(4, F), "inner_w"))
    editor = Editor(proto)
    editor.remove_unused()
    assert editor.export() == branches()


def test_attributes_and_operators_change() -> None:
    editor = Editor(model("g (float[4] x) => (float[4] y) { [n] y = LeakyRelu<alpha = 0.5>(x) }"))
    editor.set_attr("n", "alpha", 2.0)
    assert GraphIndex(editor.export()).find_node("n").attrs["alpha"] == 2.0
    editor.set_attr("n", "alpha", None)
    editor.set_op("n", "Concat")
    editor.set_attr("n", "axis", 0)
    node = editor.export().graph.node[0]
    assert (node.op_type, [a.name for a in node.attribute]) == ("Concat", ["axis"])
    editor.set_attr("n", "axes", [])
    assert editor.export().graph.node[0].attribute[1].type == 7


def test_an_input_can_be_added_and_left_out() -> None:
    editor = Editor(model("g (float[4] x) => (float[4] y) { [n] y = Clip(x, low) }", low=0.0, high=1.0))
    editor.replace_input(Edge("n", 2), "high")
    editor.replace_input(Edge("n", 1), "")
    assert GraphIndex(editor.export()).find_node("n").inputs == ("x", "", "high")


def test_new_domains_are_imported(editor: Editor) -> None:
    editor.insert_node("if.else_branch", "Op", ["k"], ["k2"], name="custom", domain="some.where")
    editor.rewire(TensorId("k", "if.else_branch"), "k2")
    assert ("some.where", 1) in {(entry.domain, entry.version) for entry in editor.export().opset_import}


def test_loop_bodies_are_edited_through_their_inputs_and_outputs() -> None:
    text = """g (float[4] x) => (float[4] y, float[N,4] all) {
        [l] y, all = Loop(n, keep, x) <body = b (int64 i, bool go, float[4] state)
                                       => (bool on, float[4] next, float[4] each) {
            [k] on = Identity(go) [p] next = Add(state, x) [q] each = Mul(next, w) }> }"""
    proto = model(text, n=np.array(3), keep=np.array(True), w=np.full(4, 2, F))
    editor = Editor(proto)
    editor.rename_tensor(TensorId("state", "l.body"), "carried")
    editor.insert_node("l.body", "Identity", ["carried"], ["copy"], name="copy")
    editor.rewire(TensorId("carried", "l.body"), "copy")
    editor.insert_node("l.body", "Identity", ["next"], ["next2"], name="copy2", after="p")
    editor.rewire(TensorId("next", "l.body"), "next2", outputs=True)
    editor.remove_unused()
    result = editor.export()
    verify_graph(result)
    index = GraphIndex(result)
    assert index.scope_inputs("l.body") == ("i", "go", "carried")
    assert index.scope_outputs("l.body") == ("on", "next2", "each")
    for before, after in zip(compute(proto), compute(result), strict=True):
        np.testing.assert_array_equal(before, after)


REFUSED = {
    "no such node": lambda e: e.remove_node("upp"),
    "no such scope": lambda e: e.add_initializer("if.then", "n", np.ones(1)),
    "no such tensor": lambda e: e.rename_tensor(TensorId("aa"), "n"),
    "an input renamed": lambda e: e.rename_tensor(TensorId("x"), "n"),
    "an output rewired": lambda e: e.rewire(TensorId("y"), "a", outputs=True),
    "a name taken": lambda e: e.insert_node("", "Neg", ["a"], ["i"], name="n"),
    "a name taken inside": lambda e: e.insert_node("", "Neg", ["a"], ["k"], name="n"),
    "a name taken outside": lambda e: e.insert_node("if.then_branch", "Neg", ["a"], ["a"], name="n"),
    "a node name taken": lambda e: e.insert_node("", "Neg", ["a"], ["new"], name="n3"),
    "an anchor elsewhere": lambda e: e.insert_node("", "Neg", ["a"], ["new"], name="n", before="n3"),
    "an input not visible": lambda e: e.insert_node("if.else_branch", "Neg", ["i2"], ["new"], name="n"),
    "a strange edge": lambda e: e.rewire(TensorId("a"), "z", consumers=[Edge("n4", 0, "if.else_branch")]),
    "an index too high": lambda e: e.replace_input(Edge("end", 3), "a"),
    "not an initializer": lambda e: e.replace_initializer(TensorId("a"), np.ones(1)),
    "an initializer in use": lambda e: e.remove_initializer(TensorId("w")),
    "a body": lambda e: e.set_attr("end", "g", helper.make_attribute("g", branches().graph)),
    "a tensor without a name": lambda e: e.add_initializer("", "", np.ones(1)),
}


@pytest.mark.parametrize("edit", REFUSED.values(), ids=REFUSED.keys())
def test_nonsense_is_refused_and_changes_nothing(editor: Editor, edit: object) -> None:
    with pytest.raises(ModelError):
        edit(editor)  # type: ignore[operator]
    assert editor.export() == branches()


@pytest.mark.parametrize("edge", [Edge("up", 0), Edge("n4", 1, "if.else_branch")], ids=["plain", "through a body"])
def test_a_cycle_is_refused_at_export(editor: Editor, edge: Edge) -> None:
    editor.replace_input(edge, "y")
    with pytest.raises(ModelError, match="own output"):
        editor.export()


SEEDS = st.integers(0, 10**6)


def tensors(index: GraphIndex) -> list[TensorId]:
    """Every tensor that a node makes or the main graph is given as input."""
    made = [TensorId(name, node.scope) for node in index.nodes for name in node.outputs if name]
    return [*made, TensorId("x"), TensorId("z"), *(TensorId(f"w{k}") for k in range(3))]


def insert_pair(editor: Editor, index: GraphIndex, t: TensorId) -> None:
    """Two Identities behind a tensor, as a quantize/dequantize pair is put."""
    if t.scope == "" and index.is_output(t):
        raw = editor.fresh(f"{t.name}/raw")
        editor.rename_tensor(t, raw)
        source, last = raw, t.name
    else:
        source, last = t.name, editor.fresh(f"{t.name}/DequantizeLinear_Output")
    middle = editor.fresh(f"{t.name}/QuantizeLinear_Output")
    maker = index.find_producer(t)
    after = maker.name if maker is not None else None
    editor.insert_node(
        t.scope, "Identity", [source], [middle], name=editor.fresh(f"{t.name}/QuantizeLinear"), after=after
    )
    editor.insert_node(t.scope, "Identity", [middle], [last], name=editor.fresh(f"{t.name}/DequantizeLinear"))
    editor.rewire(TensorId(source, t.scope), last, outputs=bool(t.scope))


@settings(max_examples=60)
@given(models(), SEEDS)
def test_inserted_pairs_keep_the_numbers(proto: ModelProto, seed: int) -> None:
    rng, index, editor = random.Random(seed), GraphIndex(proto), Editor(proto)
    chosen = rng.sample(tensors(index), k=min(4, len(tensors(index))))
    for t in chosen:
        insert_pair(editor, index, t)
    result = editor.export()
    verify_graph(result)
    assert len(GraphIndex(result).nodes) == len(index.nodes) + 2 * len(chosen)
    assert list(result.graph.output) == list(proto.graph.output)
    assert_same(proto, result)


@settings(max_examples=60)
@given(models(), SEEDS)
def test_rewiring_some_readers_to_a_copy_keeps_the_numbers(proto: ModelProto, seed: int) -> None:
    rng, index, editor = random.Random(seed), GraphIndex(proto), Editor(proto)
    for t in rng.sample(tensors(index), k=min(3, len(tensors(index)))):
        readers = editor.list_consumers(t)
        some = rng.sample(readers, k=rng.randint(0, len(readers)))
        copy = editor.fresh(f"{t.name}/copy")
        editor.insert_node(t.scope, "Identity", [t.name], [copy], name=editor.fresh("copy"))
        editor.rewire(t, copy, consumers=some)
        assert set(editor.list_consumers(TensorId(copy, t.scope))) == set(some)
    assert_same(proto, editor.export())


@settings(max_examples=60)
@given(models(), SEEDS)
def test_renaming_keeps_the_numbers(proto: ModelProto, seed: int) -> None:
    rng, index, editor = random.Random(seed), GraphIndex(proto), Editor(proto)
    free = [t for t in tensors(index) if not index.is_output(t) and t.name not in ("x", "z")]
    for t in rng.sample(free, k=rng.randint(0, len(free))):
        editor.rename_tensor(t, editor.fresh(f"renamed/{t.name}"))
    assert_same(proto, editor.export())


@settings(max_examples=60)
@given(models(), SEEDS)
def test_nothing_that_counts_is_removed(proto: ModelProto, seed: int) -> None:
    editor = Editor(shuffled(proto, seed))
    editor.remove_unused()
    result = editor.export()
    checker.check_model(result)
    index = GraphIndex(result)
    for node in index.nodes:
        made = TensorId(node.outputs[0], node.scope)
        assert index.list_consumers(made) or index.is_output(made) or index.captured(made)
    assert_same(proto, result)
