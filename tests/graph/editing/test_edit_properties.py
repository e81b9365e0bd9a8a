"""Edits of random models: the numbers stay, whatever is inserted, rewired, renamed or removed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, checker

from onnxq.graph import Editor, GraphIndex, verify_graph
from onnxq.sites import TensorId
from tests.graph.kit import assert_same, models, shuffled

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
    rng = random.Random(seed)
    index = GraphIndex(proto)
    editor = Editor(proto)
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
    rng = random.Random(seed)
    index = GraphIndex(proto)
    editor = Editor(proto)
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
    rng = random.Random(seed)
    index = GraphIndex(proto)
    editor = Editor(proto)
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


@given(models(), SEEDS)
def test_an_export_without_edits_changes_nothing(proto: ModelProto, seed: int) -> None:
    for variant in (proto, shuffled(proto, seed)):
        assert Editor(variant).export() == variant
