"""Models with the attribute `bits`: read as any other, and nothing of them is lost or left behind."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onnxq.annotate import read_model
from onnxq.annotate.read import drop_attribute, list_pair_nodes, set_attribute
from onnxq.errors import ModelError
from tests.annotate import models


def with_attributes(make, bits: int = 5) -> onnx.ModelProto:
    proto = make()
    for node in list_pair_nodes(proto):
        set_attribute(node, bits)
    return proto


@pytest.mark.parametrize("make", [models.two_widths, models.branches, models.in_function, models.dedicated])
def test_attributes_in_every_graph_survive_reading(make, tmp_path: Path) -> None:
    proto = with_attributes(make)
    onnx.save(proto, tmp_path / "m.onnx")
    for source in (proto, tmp_path / "m.onnx"):
        read = read_model(source).proto
        nodes = list_pair_nodes(read)
        assert [drop_attribute(node) for node in nodes] == [5] * len(nodes)
        assert len(nodes) == len(list_pair_nodes(proto))
        # The metadata that held the values during the check is gone again.
        assert not any(entry.key.startswith("onnxq.") for node in nodes for entry in node.metadata_props)


def test_the_callers_model_is_not_touched() -> None:
    proto = with_attributes(models.two_widths)
    before = proto.SerializeToString(deterministic=True)
    read_model(proto)
    assert proto.SerializeToString(deterministic=True) == before


def test_an_attribute_is_set_once_and_dropped_once() -> None:
    node = list_pair_nodes(models.two_widths())[0]
    kept = len(node.attribute)
    set_attribute(node, 4)
    set_attribute(node, 7)
    assert len(node.attribute) == kept + 1
    assert drop_attribute(node) == 7
    assert drop_attribute(node) is None


def test_size_and_files_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(with_attributes(models.two_widths), path)
    read = read_model(path)
    assert (read.path, read.size_bytes, read.external) == (path, path.stat().st_size, False)
    assert read.files == (path,)


def test_a_fault_beside_the_attribute_stays_an_error(tmp_path: Path) -> None:
    proto = with_attributes(models.two_widths)
    proto.graph.node[-1].input[0] = "nobody"
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ModelError) as caught:
        read_model(tmp_path / "m.onnx")
    assert caught.value.code == "Q103"
