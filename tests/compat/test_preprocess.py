"""Preprocessing: the same network, named and with shapes, from Python and the command line."""

from __future__ import annotations

import onnx
import pytest

from onnxq.compat import CompatWarning, quant_pre_process
from onnxq.compat.preprocess import main
from onnxq.errors import ConfigError
from tests.compat import scripts


def test_the_network_stays_and_every_node_has_a_name(tmp_path) -> None:
    proto = scripts.make_net(scripts.CLASSIFIER)
    proto.graph.node[0].name = ""
    onnx.save(proto, tmp_path / "m.onnx")
    main(["--input", str(tmp_path / "m.onnx"), "--output", str(tmp_path / "p.onnx"), "--skip_symbolic_shape", "True"])
    made = onnx.load(tmp_path / "p.onnx")
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in proto.graph.node]
    assert all(node.name for node in made.graph.node)
    assert {one.name for one in made.graph.value_info} == set("crdstpf")
    assert made.graph.initializer == proto.graph.initializer


def test_weights_may_lie_beside(tmp_path) -> None:
    proto = scripts.make_net(scripts.CLASSIFIER)
    with pytest.warns(CompatWarning, match="external_data_location means nothing here"):
        quant_pre_process(proto, tmp_path / "p.onnx", save_as_external_data=True, external_data_location="weights.bin")
    assert (tmp_path / "p.onnx_data").exists()


def test_a_model_is_needed(tmp_path) -> None:
    with pytest.raises(ConfigError, match="input_model: is not given"):
        quant_pre_process(output_model_path=tmp_path / "p.onnx")
    proto = scripts.make_net(scripts.CLASSIFIER)
    quant_pre_process(output_model_path=tmp_path / "p.onnx", input_model_path=proto)
    assert (tmp_path / "p.onnx").exists()
