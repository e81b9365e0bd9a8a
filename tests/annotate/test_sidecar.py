"""Notes beside a model, and found again after tools renamed or dropped nodes; between carriers no bits are lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq import annotate
from onnxq.errors import PlanError
from tests.annotate import models


def beside(folder, proto):
    """The notes of a model, by way of a file."""
    path = folder / "notes.json"
    path.write_text(annotate.write_sidecar(proto, annotate.find_pairs(proto)))
    return annotate.read_sidecar(path)


def rename(proto, *, tensors=False):
    """The model as a tool leaves it that names nodes, and tensors if asked for, by number, and drops metadata."""
    model = annotate.strip_notes(proto).model
    inner = {name for node in model.graph.node for name in node.output} - {value.name for value in model.graph.output}
    new = {name: f"t{k}" for k, name in enumerate(sorted(inner | {w.name for w in model.graph.initializer}))}
    for k, node in enumerate(model.graph.node):
        node.name = f"n{k}"
        if tensors:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
    for weight in model.graph.initializer if tensors else ():
        weight.name = new[weight.name]
    return model


def carry(proto, carrier, folder):
    """The model with its bits in one carrier alone."""
    if carrier == "sidecar":
        return annotate.annotate_model(annotate.strip_notes(proto).model, beside=beside(folder, proto)).model
    if carrier == "attribute":
        return models.forget(annotate.write_bits(proto, annotate.find_pairs(proto)))
    model = annotate.annotate_model(proto).model
    if carrier == "nodes":
        del model.metadata_props[:]
    for node in model.graph.node if carrier == "model" else ():
        del node.metadata_props[:]
    return model


CARRIERS = st.lists(st.sampled_from(["sidecar", "attribute", "model", "nodes"]), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(4, 8), st.integers(5, 8), CARRIERS)
def test_bits_go_from_carrier_to_carrier(tmp_path_factory, x, w, y, carriers):
    folder = tmp_path_factory.mktemp("carriers")
    model = annotate.annotate_model(models.two_widths(), given=[("x", x), ("w", w), ("y", y)]).model
    expected = {pair.nodes[-1]: pair.bits for pair in annotate.find_pairs(model)}
    for carrier in carriers:
        model = carry(model, carrier, folder)
        assert {pair.nodes[-1]: pair.bits for pair in annotate.find_pairs(model)} == expected


@pytest.mark.parametrize("make", models.RUNNING)
def test_a_sidecar_gives_back_all_that_was_stripped(make, tmp_path):
    noted = annotate.annotate_model(make()).model
    again = annotate.annotate_model(annotate.strip_notes(noted).model, beside=beside(tmp_path, noted))
    assert models.bare(again.pairs) == models.bare(annotate.find_pairs(noted))
    assert {pair.origin for pair in again.pairs} == {annotate.Origin.NAME}
    assert again.model == noted


def test_names_of_tensors_then_structure_find_notes_of_renamed_nodes(tmp_path):
    noted = annotate.annotate_model(models.two_widths(), given=[("x", 7), ("w", 5), ("y", 6)]).model
    notes = beside(tmp_path, noted)
    wanted = [pair.bits for pair in annotate.find_pairs(noted)]
    named = annotate.annotate_model(rename(noted), beside=notes)
    assert [pair.bits for pair in named.pairs] == wanted
    assert {str(pair.site): pair.origin for pair in named.pairs}["x"] is annotate.Origin.TENSOR
    moved = annotate.annotate_model(rename(noted, tensors=True), beside=notes)
    assert [pair.bits for pair in moved.pairs] == wanted
    assert [pair.origin for pair in moved.pairs].count(annotate.Origin.STRUCTURE) >= 3
    # Of x and y, which are noted narrower than anything bounds; no note names what is not there.
    assert {fault.why[:13] for fault in annotate.check_notes(moved.model).disagreements} == {"a label alone"}


def test_the_models_own_notes_are_found_again_by_the_names_of_tensors():
    noted = annotate.annotate_model(models.two_widths(), given=[("c", 3), ("y", 6)]).model
    kept = [entry for entry in noted.metadata_props if entry.key == "onnxq.bits"]
    renamed = rename(noted)
    assert not any(pair.origin is annotate.Origin.TENSOR for pair in annotate.annotate_model(renamed).pairs)
    renamed.metadata_props.extend(kept)
    found = {str(pair.site): (pair.bits, pair.origin) for pair in annotate.annotate_model(renamed).pairs}
    assert (found["c"], found["y"]) == ((3, annotate.Origin.TENSOR), (6, annotate.Origin.TENSOR))


def test_notes_that_fit_no_pair_are_named_and_left_out(tmp_path):
    noted = annotate.annotate_model(models.two_widths()).model
    notes = {
        name: {**note, "bits": 2} if note["site"] == "w" else note for name, note in beside(tmp_path, noted).items()
    }
    notes["lost"] = {"site": "gone", "bits": 8}
    found = annotate.annotate_model(annotate.strip_notes(noted).model, beside=notes)
    assert "left out (2): w (2 bits), gone (8 bits)" in found.warnings[-1]
    assert {str(pair.site): pair.bits for pair in found.pairs}["w"] == 4


def test_twins_get_no_note_unless_both_have_the_same(tmp_path):
    """Two pairs of one tensor, alike in all but their names: nobody reads what becomes of them."""
    twins = models.model(
        f"{models.pair('x', 'a')} {models.pair('x', 'b')} p = Neg(a) q = Neg(b) y = Neg(x)",
        s=np.float32(0.1), z=np.int8(0),
    )  # fmt: skip
    noted = annotate.annotate_model(twins, given=[("a/*", 5), ("b/*", 6)]).model
    renamed = rename(noted, tensors=True)
    notes = {name: {**note, "site": f"lost {name}"} for name, note in beside(tmp_path, noted).items()}
    assert {pair.bits for pair in annotate.annotate_model(renamed, beside=notes).pairs} == {8}
    same = {name: {**note, "bits": 5} for name, note in notes.items()}
    assert {pair.bits for pair in annotate.annotate_model(renamed, beside=same).pairs} == {5}


def test_strip_takes_every_carrier_and_leaves_the_rest():
    noted = annotate.annotate_model(models.two_widths(), bits_attribute=True).model
    noted.metadata_props.add(key="author", value="me")
    noted.metadata_props.add(key="onnxq.plan", value="{}")
    bared = annotate.strip_notes(noted)
    source = annotate.annotate_model(models.two_widths()).model
    assert [entry.key for entry in bared.model.metadata_props] == ["author"]
    assert not any(
        node.metadata_props or any(a.name == "bits" for a in node.attribute) for node in bared.model.graph.node
    )
    assert models.bare(bared.pairs) == models.bare(annotate.find_pairs(models.two_widths()))
    assert "onnxq.bits, onnxq.plan, metadata of" in bared.warnings[-1]
    assert len(bared.model.graph.node) == len(source.graph.node)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"n": {"site": "x"}}', '{"n": {"bits": 4}, "n": {"bits": 5}}'])
def test_a_file_that_holds_no_notes_is_refused(text, tmp_path):
    (tmp_path / "n.json").write_text(text)
    with pytest.raises(PlanError, match=r"\[Q411\]"):
        annotate.read_sidecar(tmp_path / "n.json")


def test_the_note_of_an_input_finds_the_pair_that_alone_is_read_there():
    """DynamicQuantizeLSTM quantizes by itself: its pair is read back under the name of the tensor, not of the input."""
    model = models.model(f"{models.pair('x', 'a')} [p] p = Neg(a) y = Add(p, x)", s=np.float32(0.1), z=np.int8(0))
    found = annotate.annotate_model(model, beside={"gone": {"site": "p/in0", "bits": 7}})
    assert found.warnings == ()
    assert [(pair.bits, pair.origin) for pair in found.pairs] == [(7, annotate.Origin.TENSOR)]
