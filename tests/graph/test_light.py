"""Weights held beside a model: copies are light, answers and bytes the same, and nothing leaves a block unfilled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

import onnxq
from onnxq.errors import ModelError
from onnxq.graph import Editor, GraphIndex, filled, held, hold, holding, infer_shapes, load_model, save_model
from onnxq.graph.held import is_held
from onnxq.runtime import Session, tap
from onnxq.sites import TensorId

F = np.float32


def large() -> onnx.ModelProto:
    """Two MatMuls with weights of 64 KiB, one of them twice, a bias too small to hold, and an unread weight."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        main (float[N, 128] x) => (float[N, 128] y) {
          [a] m = MatMul(x, w)
          [b] r = Relu(m)
          [c] n = MatMul(r, w)
          [d] o = MatMul(n, v)
          [e] y = Add(o, bias)
        }"""
    )
    rng = np.random.default_rng(0)
    for name in ("w", "v", "unread"):
        array = (rng.standard_normal((128, 128)) / 12).astype(F)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(128).astype(F), "bias"))
    return proto


def test_held_and_filled_are_the_same_bytes_and_give_the_same_answers() -> None:
    proto = large()
    before = proto.SerializeToString(deterministic=True)
    x = {"x": np.random.default_rng(1).standard_normal((3, 128)).astype(F)}
    wanted = Session(proto, optimize=False).run(x)["y"]
    with holding():
        light = hold(proto)
        assert [is_held(tensor) for tensor in light.graph.initializer] == [True, True, True, False]
        assert light.ByteSize() < 2000 < proto.ByteSize()
        for optimize in (False, True):
            again = Session(light, optimize=optimize)
            np.testing.assert_array_equal(again.run(x)["y"], Session(proto, optimize=optimize).run(x)["y"])
        index = GraphIndex(infer_shapes(light))
        value = index.constant(TensorId("w"))
        assert value is not None
        np.testing.assert_array_equal(value, numpy_helper.to_array(proto.graph.initializer[0]))
        assert not value.flags.writeable
        tapped = tap(light, [TensorId("n")], only=True)
        assert Session(tapped.proto, optimize=False).run(x)["n"].shape == (3, 128)
        assert filled(light).SerializeToString(deterministic=True) == before
        session = Session(light, optimize=False)
    assert proto.SerializeToString(deterministic=True) == before
    # A session outlives the block that its weights were held in; the model does not.
    np.testing.assert_array_equal(session.run(x)["y"], wanted)
    with pytest.raises(ModelError, match="no longer held"):
        filled(light)


def test_edits_inside_a_block_hold_and_blocks_let_go_of_their_own() -> None:
    proto = large()
    new = np.full((128, 128), 0.5, F)
    with holding():
        outer = hold(proto)
        with holding():
            editor = Editor(outer)
            editor.replace_initializer(TensorId("v"), new)
            editor.add_initializer("", "int8", np.ones((200, 200), np.int8))
            inner = editor.export()
            kinds = {tensor.name: is_held(tensor) for tensor in inner.graph.initializer}
            assert kinds == {"w": True, "v": True, "unread": True, "bias": False, "int8": True}
            whole = filled(inner)
        with pytest.raises(ModelError, match="no longer held"):
            filled(inner)
        assert filled(outer) == proto
    plain = Editor(proto)
    plain.replace_initializer(TensorId("v"), new)
    plain.add_initializer("", "int8", np.ones((200, 200), np.int8))
    assert whole == plain.export()
    assert hold(proto) is proto


def test_what_is_written_is_whole_and_a_models_own_location_is_no_stub(tmp_path: Path) -> None:
    proto = large()
    with holding():
        save_model(hold(proto), tmp_path / "m.onnx")
    assert load_model(tmp_path / "m.onnx").proto == proto
    sly = large()
    tensor = sly.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "onnxq/held"), ("offset", "1")):
        tensor.external_data.add(key=key, value=value)
    onnx.save(sly, tmp_path / "sly.onnx")
    with holding():
        hold(proto)
        with pytest.raises(ModelError, match="is not there"):
            load_model(tmp_path / "sly.onnx")


def test_a_run_gives_the_bytes_it_gives_without(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = large()
    feeds = {"x": np.random.default_rng(2).standard_normal((12, 128)).astype(F)}
    done = onnxq.quantize(proto, feeds, effort="balanced", latency=False)
    assert not any(tensor.data_location for tensor in done.model.graph.initializer)
    monkeypatch.setattr(held, "_WORTH", 1 << 40)
    plain = onnxq.quantize(proto, feeds, effort="balanced", latency=False)
    assert done.model.SerializeToString(deterministic=True) == plain.model.SerializeToString(deterministic=True)
    again = onnxq.apply(proto, done.plan)
    assert again.model.SerializeToString(deterministic=True) == plain.model.SerializeToString(deterministic=True)
