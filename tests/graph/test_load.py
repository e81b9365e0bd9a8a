"""Reading models nobody vouches for: every fault named, nothing followed out of the folder, nothing written."""

import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxq import graph
from onnxq.errors import ModelError
from onnxq.graph.scopes import walk_all_nodes
from onnxq.graph.values import encode_tensor
from tests.graph.kit import compute, model

W = np.arange(2000, dtype=np.float32).reshape(4, 500)


def small() -> ModelProto:
    return model("g (float[4] x) => (float[500] y) { [m] y = MatMul(x, w) }", w=W)


def external(folder: Path, location: str = "weights.bin", *, real: str | None = None, **entries: object) -> Path:
    """A model in `folder` whose weight lies in `location`; `real` is where the bytes are really put."""
    proto = small()
    tensor = proto.graph.initializer[0]
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "length": len(data), **entries}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    target = folder / (real or location)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


DAMAGED = model(
    """g (float[4] x, bool c) => (float[4] y) {
    [a] a = Add(x, w)
    [i] y = If(c) <then_branch = t () => (float[4] b) { [n] b = Clip(a, k) [k] k = Constant<value_float = 1.0>() },
                   else_branch = e () => (float[4] b) { [m] b = LeakyRelu<alpha = 0.5>(a) }>
    }
    <domain: "loc", opset_import: ["": 17]> F (p) => (q) { [f] q = Neg(p) }""",
    w=np.ones(4, np.float32),
).SerializeToString()


def test_a_model_is_read_whole_and_a_proto_copied(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small().SerializeToString())
    loaded = graph.load_model(path)
    assert loaded.proto == small()
    assert (loaded.path, loaded.size_bytes, loaded.external, loaded.notes) == (path, path.stat().st_size, False, ())
    assert graph.load_model(str(path)).proto == small()
    proto = small()
    copy = graph.load_model(proto)
    copy.proto.graph.node[0].name = "changed"
    assert proto == small()
    assert copy.path is None


def test_external_data_is_read_in(tmp_path: Path) -> None:
    path = external(tmp_path, "sub/weights.bin")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    loaded = graph.load_model(path)
    assert loaded.external
    assert loaded.size_bytes == sum(len(data) for data in before.values())
    assert loaded.proto == small()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before


def test_external_data_of_attributes_and_bodies_is_read_in(tmp_path: Path) -> None:
    proto = model("""g (float[4] x, bool c) => (float[4] y) {
        [i] y = If(c) <then_branch = t () => (float[4] b) { [n] b = Add(x, w) },
                       else_branch = e () => (float[4] b) { b = Neg(x) }> }""")
    body = proto.graph.node[0].attribute[0].g
    body.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    constant = helper.make_node("Constant", [], ["k"], "k", value=numpy_helper.from_array(np.ones(4, np.float32)))
    proto.graph.node.insert(0, constant)
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, size_threshold=0, convert_attribute=True)
    again = graph.load_model(path).proto
    assert numpy_helper.to_array(again.graph.node[0].attribute[0].t).tolist() == [1] * 4
    assert numpy_helper.to_array(again.graph.node[1].attribute[0].g.initializer[0]).tolist() == [1] * 4


def fails(source: object, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        graph.load_model(source)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    fails(tmp_path / "modle.onnx", "there is no such file", "model.onnx")
    fails(tmp_path / "no" / "folder.onnx", "there is no such file")
    fails(small().SerializeToString(), "is of type bytes", "ModelProto")


def test_a_folder_names_the_models_in_it(tmp_path: Path) -> None:
    (tmp_path / "inner.onnx").write_bytes(b"x")
    fails(tmp_path, "is a folder", "inner.onnx")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x80\x04\x95\x07\x00\x00\x00", "export the network from the tool to ONNX first"),
        (b"\x08\0\0\0ORTM\0\0", "ORT-format"),
        (b"PK\x03\x04", "zip"),
        (b"<!DOCTYPE html>", "web page"),
        (b"this is not a protobuf at all \xff\xff", "not an ONNX model"),
        (numpy_helper.from_array(W).SerializeToString(), "not an ONNX model"),
        (ModelProto(ir_version=8).SerializeToString(), "not an ONNX model"),
    ],
)
def test_what_is_not_a_model_is_told(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    fails(path, str(path), words)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_told(tmp_path: Path, part: float) -> None:
    path = tmp_path / "m.onnx"
    data = small().SerializeToString()
    path.write_bytes(data[: int(len(data) * part)])
    fails(path, "truncated")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small().SerializeToString())
    path.chmod(0)
    fails(path, "cannot be read")


def test_missing_external_data_names_the_file(tmp_path: Path) -> None:
    path = external(tmp_path)
    fails(onnx.load(path, load_external_data=False), "give the path")
    (tmp_path / "weights.bin").unlink()
    fails(path, "'w'", "'weights.bin' is not there", "[Q106]", str(tmp_path))


@pytest.mark.parametrize(("location", "linked"), [("weights.bin", "weights.bin"), ("sub/weights.bin", "sub")])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, location: str, linked: str) -> None:
    path = external(tmp_path / "inner", location)
    (tmp_path / "inner" / linked).rename(tmp_path / "elsewhere")
    (tmp_path / "inner" / linked).symlink_to(tmp_path / "elsewhere")
    fails(path, "link that leads outside", "[Q107]", "cp -L")


FAULTS: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "a version of the future": (lambda m: setattr(m, "ir_version", 99), r"IR version 99.*\[Q104\]"),
    "a version of the past": (lambda m: setattr(m, "ir_version", 2), "before opsets"),
    "an opset of the future": (lambda m: setattr(m.opset_import[0], "version", 999), "opset 999"),
    "an input nobody makes": (lambda m: m.graph.node[0].input.append("nobody"), "not a valid ONNX model: Nodes"),
    "an input nobody makes behind an open shape": (
        lambda m: [m.graph.output[0].type.tensor_type.ClearField("shape"), m.graph.node[0].input.append("nobody")],
        "nobody",
    ),
    "an attribute nobody knows": (lambda m: m.graph.node[0].attribute.append(helper.make_attribute("bits", 8)), "bits"),
    "a type nobody knows": (lambda m: setattr(m.graph.initializer[0], "data_type", 99), "'w': .*element type 99"),
    "an input of such a type": (
        lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 99),
        "input.*unknown element type 99",
    ),
    "an output of such a type": (
        lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", 99),
        "output.*unknown element type 99",
    ),
    "too few bytes": (
        lambda m: setattr(m.graph.initializer[0], "raw_data", b"1234"),
        r"'w': .*needs 8000 bytes, 4 are stored \[Q105\]",
    ),
    "a constant of no name": (
        lambda m: m.graph.node.append(helper.make_node("Constant", [], [], value=m.graph.initializer[0])),
        "Constant.*zero output",
    ),
    "a constant of a number and a tensor": (
        lambda m: m.graph.node.append(helper.make_node("Constant", [], ["k"], value=1, other=m.graph.initializer[0])),
        "Constant",
    ),
    "a deprecated operator": (
        lambda m: m.CopyFrom(model(DEPRECATED, opset=18, s=np.ones(2, np.float32))),
        "deprecated(.|\n)*export it at another opset",
    ),
}
DEPRECATED = "g (float[1,4,2,2] x) => (float[1,4,2,2] y) { y = GroupNormalization<num_groups = 2>(x, s, s) }"


@pytest.mark.parametrize(("damage", "said"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_in_a_model_is_told(tmp_path: Path, damage: Callable[[ModelProto], object], said: str) -> None:
    proto = small()
    damage(proto)
    with pytest.raises(ModelError, match=said):
        graph.load_model(proto)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("../weights.bin", "points outside"),
        ("sub/../../weights.bin", "points outside"),
        ("/etc/hostname", "absolute"),
        ("C:\\weights.bin", "absolute"),
        ("..\\weights.bin", "points outside"),
        (None, "no file is named"),
    ],
)
def test_external_data_elsewhere_is_not_followed(tmp_path: Path, location: str | None, words: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(W.tobytes())
    fails(external(folder, real="ok.bin", location=location), words)


def test_a_cache_that_links_model_and_data_to_one_store_is_read(tmp_path: Path) -> None:
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    path = external(store)
    snapshot.mkdir()
    (snapshot / "model.onnx").symlink_to(path)
    (snapshot / "weights.bin").symlink_to(store / "weights.bin")
    assert graph.load_model(snapshot / "model.onnx").proto == small()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"length": 8004}, "too short"),
        ({"offset": 4}, "too short"),
        ({"offset": -4}, "too short"),
        ({"length": 4}, "needs 8000 bytes, 4 are stored"),
        ({"offset": "many"}, "not a number"),
        ({"\0ffset": 4}, "unknown key '\\x00ffset'"),
        # Since Python 3.14 a name that no file can have is that of none.
        ({"location": "n" * 3000}, "cannot be reached" if sys.version_info < (3, 14) else "is not there"),
    ],
)
def test_external_data_that_does_not_fit_is_told(tmp_path: Path, entries: dict[str, object], words: str) -> None:
    fails(external(tmp_path, **{"real": "weights.bin", **entries}), words)  # type: ignore[arg-type]


def test_what_engines_add_to_external_data_is_passed_over(tmp_path: Path) -> None:
    assert graph.load_model(external(tmp_path, checksum="0", prepacked_0="x")).proto == small()


def test_an_operator_newer_than_the_opset_raises_it() -> None:
    """Tools that fuse write Gelu or RMSNormalization and leave the opset as it was; ONNX Runtime loads no such file."""
    proto = model("g (float[4,8] x) => (float[4,8] y) { [m] a = MatMul(x, x) [g] y = Gelu(a) }", opset=17, ir=8)
    found = graph.load_model(proto)
    assert (graph.find_opset(found.proto), found.proto.ir_version) == (20, 9)
    (note,) = found.notes
    assert note.code == "W113"
    assert "'g'" in note
    assert "Gelu" in note
    assert "of opset 20, and the model declares opset 17; it declares opset 20 now" in note
    assert graph.find_opset(proto) == 17


def test_an_operator_newer_than_the_opset_is_named_where_raising_it_changes_another() -> None:
    proto = model(
        "g (float[4,8] x) => (float[4,8] y) { [m] a = Cast<to = 1>(x) [g] y = RMSNormalization<axis = -1>(a, s) }",
        opset=17, s=np.ones(8, np.float32),
    )  # fmt: skip
    fails(proto, "'g' (RMSNormalization) is an operator of opset 23, and the model declares opset 17")
    fails(proto, "export it at opset 23, or convert it with onnx.version_converter", "Cast of opset 17 may mean")


def test_names_that_are_not_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    proto = small()
    for text in (proto.graph.node[0].op_type, "MARK"):
        proto.graph.initializer[0].doc_string = "MARK"
        path.write_bytes(proto.SerializeToString().replace(text.encode(), b"\xff" * len(text)))
        fails(path, "not text")


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_bytes_give_a_model_or_an_error(seed: int, hits: int) -> None:
    """Whatever is flipped, dropped or added: what load_model lets through, the rest of the room can work on."""
    rng = random.Random(seed)
    data = bytearray(DAMAGED)
    for _ in range(hits):
        at = rng.randrange(len(data))
        end, new = rng.choice(((at + 1, 1), (at + 3, 0), (at, 2)))
        data[at:end] = rng.randbytes(new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(bytes(data))
        with suppress(ModelError):
            proto = graph.name_nodes(graph.load_model(path).proto)
            graph.GraphIndex(proto)
            graph.Editor(proto).export()
            graph.infer_shapes(proto)
            graph.compute_fingerprint(graph.inline_functions(proto))


def test_initializers_that_are_inputs_become_plain(tmp_path: Path) -> None:
    """The form of IR version 3: ORT would take every weight for an input that may change."""
    proto = model("g (float[4] x, float[4,500] w) => (float[500] y) { [m] y = MatMul(x, w) }", opset=7, ir=3, w=W)
    loaded = graph.load_model(proto)
    assert [value.name for value in loaded.proto.graph.input] == ["x"]
    assert loaded.proto.ir_version == 4
    assert loaded.notes == ("1 initializers were listed as graph inputs too; they are plain initializers now",)
    feeds = {"x": np.ones(4, np.float32)}
    np.testing.assert_array_equal(compute(loaded.proto, feeds)[0], compute(proto, feeds)[0])


def test_nodes_in_any_order_are_sorted() -> None:
    loaded = graph.load_model(model("g (float[4] x) => (float[4] y) { [b] y = Neg(a) [a] a = Relu(x) }"))
    assert [node.name for node in loaded.proto.graph.node] == ["a", "b"]
    assert len(loaded.notes) == 1


def test_a_graph_without_a_name_and_a_key_of_metadata_twice_are_read() -> None:
    """ONNX Runtime reads both; onnx.checker refuses them."""
    proto = model(
        "g (bool c, float[4] x) => (float[4] y) { y = If(c) <then_branch = t () => (float[4] a)"
        "{ a = Relu(x) }, else_branch = e () => (float[4] b) { b = Abs(x) }> }"
    )
    proto.graph.name = proto.graph.node[0].attribute[0].g.name = ""
    for value in "12":
        proto.metadata_props.add(key="version", value=value)
    loaded = graph.load_model(proto).proto
    assert loaded.graph.name
    assert [entry.value for entry in loaded.metadata_props] == ["2"]


@pytest.mark.recent_ort
def test_a_domain_is_imported_once_and_always() -> None:
    """ONNX Runtime takes both models; converters stop at the first, onnx.checker at the second."""
    text = "g (float[4] x) => (float[4] y) { [a] h = com.microsoft.Gelu(x) [b] y = ai.onnx.ml.Binarizer(h) }"
    proto = model(text)
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in (("", 28), ("ai.onnx", 17)))
    loaded = graph.load_model(proto)
    imports = {entry.domain: entry.version for entry in loaded.proto.opset_import}
    assert imports == {"ai.onnx": 17, "ai.onnx.ml": 5, "com.microsoft": 1}
    assert len(loaded.proto.opset_import) == 3
    assert [(note.code, "twice" in note) for note in loaded.notes] == [("W113", True), ("W113", False)]
    feeds = {"x": np.array([-1, 0, 1, 2], np.float32)}
    np.testing.assert_array_equal(compute(loaded.proto, feeds)[0], compute(proto, feeds)[0])


@pytest.mark.parametrize("imported", ["", "ai.onnx"])
def test_the_longer_name_of_onnxs_own_domain_is_read(imported: str) -> None:
    """ONNX Runtime takes it outside of bodies; onnx.checker knows no operator by it."""
    proto = model(
        """g (float[4] x, bool flag) => (float[4] y) { h = Relu(x) y = If(flag) <
            then_branch = then () => (float[4] t) { t = Neg(h) }, else_branch = other () => (float[4] e) { e = Exp(h) }>
        }"""
    )
    feeds = {"x": np.array([-1, 0, 1, 2], np.float32), "flag": np.array(True)}
    (wanted,) = compute(proto, feeds)
    for node in walk_all_nodes(proto):
        node.domain = "ai.onnx"
    proto.opset_import[0].domain = imported
    loaded = graph.load_model(proto)
    assert {node.domain for node in walk_all_nodes(loaded.proto)} == {""}
    assert not loaded.notes
    np.testing.assert_array_equal(compute(loaded.proto, feeds)[0], wanted)


def test_narrow_types_pass_the_size_check() -> None:
    proto = small()
    proto.graph.initializer.append(encode_tensor("four", np.arange(7), TensorProto.UINT4))
    proto.graph.initializer.append(helper.make_tensor("text", TensorProto.STRING, [2], [b"a", b"bc"]))
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros((0, 3), np.float32), "none"))
    assert graph.load_model(proto).proto == proto


TEXT = "g (float[n,4] x) => (float[n,500] y) { [m] y = MatMul(x, w) }"
FEEDS = {"x": np.ones((2, 4), np.float32)}


def loads_as_it_runs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model as loaded, whose answers in ONNX Runtime are those of the original."""
    loaded = graph.load_model(proto).proto
    np.testing.assert_array_equal(compute(loaded, FEEDS)[0], compute(proto, FEEDS)[0])
    return loaded


@pytest.mark.parametrize("where", ["input", "output", "both"])
def test_a_tensor_without_a_shape_is_loaded_and_stays_without(where: str) -> None:
    proto = model(TEXT, w=W)
    for name, declared in {"input": proto.graph.input, "output": proto.graph.output}.items():
        if where in (name, "both"):
            declared[0].type.tensor_type.ClearField("shape")
    loaded = loads_as_it_runs(proto)
    assert loaded.graph == proto.graph
    assert (graph.GraphIndex(loaded).inputs[0].shape is None) == (where != "output")


def test_an_output_without_a_type_is_loaded() -> None:
    proto = model(TEXT, w=W)
    proto.graph.output[0].ClearField("type")
    assert not loads_as_it_runs(proto).graph.output[0].HasField("type")


def test_a_sequence_of_tensors_without_a_shape_is_loaded() -> None:
    proto = model(TEXT, w=W)
    proto.graph.node.append(helper.make_node("SequenceConstruct", ["y", "y"], ["s"], name="s"))
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    proto.graph.output.append(helper.make_value_info("s", helper.make_sequence_type_proto(tensor)))
    loads_as_it_runs(proto)


@pytest.mark.parametrize("half", ["type", "elem_type"])
def test_an_input_without_a_type_is_named(half: str) -> None:
    proto = model(TEXT, w=W)
    declared = proto.graph.input[0]
    declared.ClearField("type") if half == "type" else declared.type.tensor_type.ClearField("elem_type")
    with pytest.raises(ModelError, match="input 'x': has no type"):
        graph.load_model(proto)


def test_an_input_that_a_node_writes_too_is_named() -> None:
    """Not the cycle that the two names make, nor an export that would come out the same."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2] x, float[2] cat) => (float[2] y) '
        "{ h = Relu(cat) cat = Add(h, x) y = Relu(cat) }"
    )
    with pytest.raises(ModelError, match="input 'cat': has the name of a tensor that a node writes"):
        graph.load_model(proto)


def test_an_input_with_a_default_value_becomes_a_constant_and_is_named() -> None:
    text = "g (float[n,4] x, float[500] b) => (float[n,500] y) { [m] h = MatMul(x, w) [a] y = Add(h, b) }"
    proto = model(text, ir=8, w=W, b=np.ones(500, np.float32))
    loaded = graph.load_model(proto)
    assert [value.name for value in loaded.proto.graph.input] == ["x"]
    assert loaded.notes == ("inputs with a default value are constants now, and can no longer be fed: b",)
    np.testing.assert_array_equal(compute(loaded.proto, FEEDS)[0], compute(proto, FEEDS)[0])
