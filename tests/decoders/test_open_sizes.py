"""Decoders whose caches leave sizes open, as onnxruntime-genai's model builder declares them."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex, name_nodes
from tests.decoders.layouts import Layout, make_decoder
from tests.decoders.sizes import SIZES
from tests.decoders.text import VOCABULARY

TEXT = {"data.tokenizer": "bytes", "data.samples": 8, "data.sequence_length": 24, "latency": False}


WINDOW = 40


def open_heads(model: onnx.ModelProto) -> onnx.ModelProto:
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    for value in (*opened.graph.input, *opened.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    return opened


def make_rings(*, rings: bool) -> onnx.ModelProto:
    """The first layer reads the last tokens alone, from a ring of them or from all."""
    model = name_nodes(open_heads(make_decoder(Layout.GENAI, packed=True)))
    reader = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    del reader.attribute[[attribute.name for attribute in reader.attribute].index("local_window_size")]
    reader.attribute.append(onnx.helper.make_attribute("local_window_size", WINDOW))
    if rings:
        reader.attribute.append(onnx.helper.make_attribute("sliding_window_cache", 1))
        for value in (*model.graph.input, *model.graph.output):
            if ".0." in value.name:
                value.type.tensor_type.shape.dim[2].dim_param = f"{value.name.split('.')[0]}_sliding_length"
    return model


@pytest.mark.parametrize(("layout", "packed"), [(Layout.GENAI, False), (Layout.GENAI, True)])
def test_the_reader_of_a_cache_tells_the_size_of_a_head(layout: Layout, packed: bool) -> None:
    closed = name_nodes(make_decoder(layout, packed=packed))
    opened, config = open_heads(closed), DataConfig(samples=4, sequence_length=24)
    for source in (None, "self-generated"):
        ours = load_data(source, GraphIndex(opened).inputs, config, opened)
        theirs = load_data(source, GraphIndex(closed).inputs, config, closed)
        assert ours[3]["past_key_values.1.value"].shape[3] == SIZES.head
        for sample, same in zip(ours.samples(), theirs.samples(), strict=True):
            for name, value in same.items():
                np.testing.assert_array_equal(sample[name], value)


def test_they_are_quantized_and_measured_on_text(tmp_path: Path) -> None:
    opened, text = open_heads(make_decoder(Layout.GENAI, packed=True)), tmp_path / "a.txt"
    text.write_bytes(bytes(range(VOCABULARY)) * 8)
    result = onnxq.quantize(opened, text, "ort-int4-weights", overrides={"effort": "fast", **TEXT})
    # Callers bind caches by what the file declares.
    assert [value.SerializeToString() for value in result.model.graph.input] == [
        value.SerializeToString() for value in opened.graph.input
    ]
    score = onnxq.perplexity([opened, result.model], text, overrides=TEXT | {"generate": 0}).models[1]
    assert score.divergence < 0.2


def test_a_ring_of_the_last_tokens_is_as_long_as_its_window(tmp_path: Path) -> None:
    rings, text = make_rings(rings=True), tmp_path / "a.txt"
    text.write_bytes(bytes(range(VOCABULARY)) * 8)
    config = DataConfig(tokenizer="bytes", samples=8, sequence_length=24)
    samples = list(load_data(text, GraphIndex(rings).inputs, config, rings).samples())
    assert {sample["past_key_values.0.key"].shape[2] for sample in samples} == {WINDOW}
    assert [sample["input_ids"].shape[1] for sample in samples[3::4]] == [1, 8]
    # ONNX Runtime leaves anything in slots that no token has reached yet.
    assert not samples[3]["past_key_values.0.key"][:, :, samples[3]["past_key_values.1.key"].shape[2] :].any()
    for data in (text, None):
        result = onnxq.quantize(rings, data, "ort-int4-weights", overrides={"effort": "fast", **TEXT})
        assert min(min(check.sqnr_db) for check in result.report.checks) > 10
    models = [make_rings(rings=False), rings]
    assert onnxq.perplexity(models, text, overrides=TEXT | {"generate": 30}).models[1].divergence < 1e-9
