"""Models around the bytes of their weights, and arrays in files: the same bytes, and no memory once they are let go."""

import mmap
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxq.graph import strip_weights
from onnxq.graph.skeleton import read_skeleton, write_model
from onnxq.graph.storage import Spool, cut_bytes, release_pages

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
