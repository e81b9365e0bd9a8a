"""Weights beside the graph or in files: light copies, the same bytes and answers, gone with the last who needs them."""

import gc
import mmap
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxq
from onnxq import graph
from onnxq.errors import ModelError
from onnxq.graph import strip_weights
from onnxq.graph.light import measure_size
from onnxq.graph.skeleton import read_skeleton, write_model
from onnxq.graph.storage import Spool, cut_bytes, is_stub, release_pages
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.graph import kit

F = np.float32


def large() -> onnx.ModelProto:
    """Two MatMuls with weights of 64 KiB, one of them twice, a bias too small to strip, and an unread weight."""
    rng = np.random.default_rng(0)
    weights = {name: (rng.standard_normal((128, 128)) / 12).astype(F) for name in ("w", "v", "unread")}
    text = """main (float[N, 128] x) => (float[N, 128] y) {
        [a] m = MatMul(x, w) [b] r = Relu(m) [c] n = MatMul(r, w) [d] o = MatMul(n, v) [e] y = Add(o, bias) }"""
    return kit.model(text, **weights, bias=rng.standard_normal(128).astype(F))


def stubs(model: graph.LightModel) -> dict[str, bool]:
    return {tensor.name: is_stub(tensor) for tensor in model.graph.initializer}


def test_a_light_and_a_whole_model_are_the_same_bytes_and_give_the_same_answers() -> None:
    proto = large()
    before = proto.SerializeToString(deterministic=True)
    x = {"x": np.random.default_rng(1).standard_normal((3, 128)).astype(F)}
    model = graph.strip_weights(proto)
    assert stubs(model) == {"w": True, "v": True, "unread": True, "bias": False}
    assert model.proto.ByteSize() < 2000 < proto.ByteSize()
    for optimize in (False, True):
        again = Session(model, optimize=optimize)
        np.testing.assert_array_equal(again.run(x)["y"], Session(proto, optimize=optimize).run(x)["y"])
    value = graph.GraphIndex(graph.infer_shapes(model)).find_constant(TensorId("w"))
    np.testing.assert_array_equal(value, numpy_helper.to_array(proto.graph.initializer[0]))
    assert not value.flags.writeable
    tapped = tap_tensors(model, [TensorId("n")], only=True)
    assert Session(tapped.proto, optimize=False).run(x)["n"].shape == (3, 128)
    assert graph.attach_weights(model).SerializeToString(deterministic=True) == before
    assert proto.SerializeToString(deterministic=True) == before


def test_whole_models_stay_whole_and_light_ones_light() -> None:
    proto = large()
    model = graph.strip_weights(proto)
    assert graph.attach_weights(proto) is proto
    assert graph.strip_weights(model) is model
    assert isinstance(graph.name_nodes(model), graph.LightModel)
    assert isinstance(graph.name_nodes(proto), onnx.ModelProto)
    small = graph.strip_weights(kit.model("m (float[1] x) => (float[1] y) { y = Relu(x) }"))
    assert graph.attach_weights(small) is small.proto


def test_edits_of_a_light_model_share_its_arrays_and_leave_it_as_it_was() -> None:
    proto = large()
    new = np.full((128, 128), 0.5, F)
    model = graph.strip_weights(proto)

    def edited(source: object) -> object:
        editor = graph.Editor(source)
        editor.replace_initializer(TensorId("v"), new)
        editor.add_initializer("", "int8", np.ones((200, 200), np.int8))
        editor.rename_tensor(TensorId("unread"), "still unread")
        return editor.export()

    inner = edited(model)
    assert isinstance(inner, graph.LightModel)
    assert stubs(inner) == {"w": True, "v": True, "still unread": True, "bias": False, "int8": True}
    ours, theirs = (graph.get_index(one).find_constant(TensorId("w")) for one in (inner, model))
    assert ours is theirs
    assert graph.attach_weights(inner) == edited(proto)
    assert graph.attach_weights(model) == proto


def test_arrays_are_freed_with_the_last_model_or_session_that_uses_them() -> None:
    gc.disable()
    try:
        model = graph.strip_weights(large())
        gone, kept = (
            weakref.ref(graph.get_index(model).find_constant(TensorId(name)).base) for name in ("unread", "w")
        )
        editor = graph.Editor(model)
        editor.remove_initializer(TensorId("unread"))
        inner = editor.export()
        del model, editor
        assert gone() is None
        assert kept() is not None
        session = Session(inner, optimize=False)
        del inner
        x = {"x": np.random.default_rng(1).standard_normal((3, 128)).astype(F)}
        np.testing.assert_array_equal(session.run(x)["y"], Session(large(), optimize=False).run(x)["y"])
        del session
        assert kept() is None
    finally:
        gc.enable()


def test_the_index_of_a_light_model_is_made_once() -> None:
    model = graph.strip_weights(large())
    assert graph.get_index(model) is graph.get_index(model)
    assert graph.get_index(graph.name_nodes(model)) is not graph.get_index(model)


def test_a_model_beyond_the_limit_of_protobuf_has_a_size() -> None:
    whole, zeros = ModelProto(), bytes(2**27)
    for k in range(16):
        whole.graph.initializer.add(name=f"w{k}", data_type=TensorProto.INT8, dims=[2**27], raw_data=zeros)
    assert measure_size(whole) == 2**31


def test_what_is_written_is_whole_and_a_models_own_location_is_no_stub(tmp_path: Path) -> None:
    proto = large()
    graph.save_model(graph.strip_weights(proto), tmp_path / "m.onnx")
    assert graph.load_model(tmp_path / "m.onnx").proto == proto
    sly = large()
    tensor = sly.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "onnxq/held"), ("offset", "1")):
        tensor.external_data.add(key=key, value=value)
    onnx.save(sly, tmp_path / "sly.onnx")
    with pytest.raises(ModelError, match="is not there"):
        graph.load_model(tmp_path / "sly.onnx")


def test_a_run_gives_the_bytes_it_gives_without(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = large()
    feeds = {"x": np.random.default_rng(2).standard_normal((12, 128)).astype(F)}
    done = onnxq.quantize(proto, feeds, overrides={"effort": "balanced", "latency": False})
    assert not any(tensor.data_location for tensor in done.model.graph.initializer)
    monkeypatch.setattr(graph.light, "SMALLEST_STUB", 1 << 40)
    plain = onnxq.quantize(proto, feeds, overrides={"effort": "balanced", "latency": False})
    assert done.model.SerializeToString(deterministic=True) == plain.model.SerializeToString(deterministic=True)
    again = onnxq.apply(proto, done.plan)
    assert again.model.SerializeToString(deterministic=True) == plain.model.SerializeToString(deterministic=True)


arrays = st.lists(st.integers(0, 9000), max_size=5)


def make_model(sizes: list[int], text: str) -> ModelProto:
    """A model with an initializer of each size, in float32, and names, notes and metadata around them."""
    tensors = [numpy_helper.from_array(np.arange(size, dtype=np.float32), f"w{k}") for k, size in enumerate(sizes)]
    for tensor in tensors[::2]:
        tensor.doc_string = text
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "main", values[:1], values[1:], tensors)
    graph.doc_string = text
    model = helper.make_model(graph, producer_name=text)
    helper.set_model_props(model, {"note": text})
    return model


@settings(max_examples=30, deadline=None)
@given(arrays, st.text(max_size=200))
def test_what_is_written_around_the_weights_is_what_protobuf_writes(sizes: list[int], text: str) -> None:
    model = make_model(sizes, text)
    light = strip_weights(model)
    written = b"".join(write_model(light.proto, lambda tensor: cut_bytes(light.weights.bytes_of(tensor))))
    assert written == model.SerializeToString(deterministic=True)


@settings(max_examples=30, deadline=None)
@given(arrays, st.text(max_size=200), st.integers(1, 40000))
def test_a_skeleton_with_its_bytes_is_the_model(sizes: list[int], text: str, least: int) -> None:
    model = make_model(sizes, text)
    data = model.SerializeToString()
    skeleton, left_out = read_skeleton(data, least)
    read = ModelProto.FromString(skeleton)
    assert len(skeleton) <= len(data)
    for number, (offset, length) in left_out.items():
        assert length >= least
        assert not read.graph.initializer[number].raw_data
        read.graph.initializer[number].raw_data = data[offset : offset + length]
    assert read == model
    assert set(left_out) == {k for k, size in enumerate(sizes) if 4 * size >= least}


@pytest.mark.parametrize("cut", [1, 3, 100, 5000])
def test_what_is_no_message_is_refused(cut: int) -> None:
    data = make_model([2000], "").SerializeToString()
    with pytest.raises(ValueError, match=r"field|number"):
        read_skeleton(data[:-cut] + b"\xff" * (cut - 1), 1)


def test_fields_that_stand_twice_are_read_as_protobuf_reads_them() -> None:
    model, more = make_model([5000], "a"), ModelProto()
    more.graph.initializer.append(numpy_helper.from_array(np.ones(6000, np.float32), "second"))
    data = model.SerializeToString() + more.SerializeToString()
    skeleton, left_out = read_skeleton(data, 1000)
    read = ModelProto.FromString(skeleton)
    for number, (offset, length) in left_out.items():
        read.graph.initializer[number].raw_data = data[offset : offset + length]
    assert read == onnx.ModelProto.FromString(data)
    assert len(left_out) == 2


def count_resident() -> int:
    """Kilobytes of mapped files in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is told by /proc")
def test_released_pages_take_no_memory_and_come_back() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32).reshape(-1, 64)
    array = Spool().write(values).map()
    empty = count_resident()
    assert np.array_equal(array, values)
    assert count_resident() - empty > 15 << 10
    # A view of it, as parts of it are looked at.
    release_pages(array[5:].T)
    assert count_resident() - empty < 1 << 10
    assert np.array_equal(array, values)


def test_memory_of_ones_own_stays() -> None:
    values = np.arange(8.0)
    release_pages(values, values[2:], np.float32(1) * np.ones(()))
    assert values.tolist() == list(range(8))
    assert not isinstance(values.base, mmap.mmap)
