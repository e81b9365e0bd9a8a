"""Decoders with caches, as exporters write them, through every mode: what they write afterwards, and how well."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnxq
from onnxq.backends import load_config
from onnxq.config import Config, DataConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex, name_nodes
from onnxq.graph.scopes import walk_graphs
from onnxq.runtime import optimize_graph
from tests.decoders.generation import Player, make_samples
from tests.decoders.layouts import Layout, make_decoder
from tests.decoders.sizes import SIZES
from tests.decoders.text import VOCABULARY, decode_tokens, encode_text
from tests.networks import count_ops

PROMPT = encode_text()[:, :40]
# The text goes on so.
NEXT = "e, by which rule and why. The planner asks the tar"
QUICK = {"effort": "fast", "latency": False}
# Every product, also those that are too small to gain by it.
ALL = {"rules": [{"op": "MatMul", "set": {"quantize": True}}]}
MODES: dict[str, Config] = {
    "static": load_config("ort-int8", ALL),
    "dynamic": load_config("ort-dynamic", ALL),
    "auto": load_config("ort-int8", {"mode": "auto"}),
    "8 bits": load_config("ort-int8-weights"),
    "4 bits": load_config("ort-int4-weights"),
    "4 bits, float16": load_config("ort-int4-weights", {"high_precision": "float16"}),
    "float16": load_config("ort-int8", {"mode": "float", "high_precision": "float16"}),
    "trt, int8": load_config("trt-int8"),
    "trt, int4": load_config("trt-int4-weights", {"weights.block_size": 32}),
}
# Perplexity beside float's.
WORST = {"4 bits": 1.015, "4 bits, float16": 1.015, "trt, int4": 1.03}


@cache
def make_float(layout: Layout, half: bool = False) -> tuple[onnx.ModelProto, Player]:
    model = make_decoder(layout, np.float16 if half else np.float32)
    return model, Player(model)


def quantize(layout: Layout, mode: str, half: bool = False, **more: Any) -> onnxq.Result:
    model, player = make_float(layout, half)
    return onnxq.quantize(model, make_samples(player), MODES[mode], overrides=QUICK | more)


def assert_writes_the_same(layout: Layout, result: onnxq.Result, mode: str, half: bool = False) -> None:
    """Fifty tokens, the caches fed back, and the perplexity of a text through the caches."""
    player = Player(result.model)
    assert decode_tokens(player.generate(PROMPT)) == NEXT
    before = make_float(layout, half)[1].measure_perplexity()
    assert player.measure_perplexity() < WORST.get(mode, 1.002) * before


@pytest.mark.parametrize("layout", Layout)
def test_all_layouts_compute_the_same(layout: Layout) -> None:
    player = make_float(layout)[1]
    assert decode_tokens(player.generate(PROMPT)) == NEXT
    assert player.measure_perplexity() == pytest.approx(make_float(Layout.PLAIN)[1].measure_perplexity(), rel=1e-5)


@pytest.mark.recent_ort
@pytest.mark.parametrize("mode", MODES)
def test_a_decoder_of_onnxruntime_genai_through_every_mode(mode: str) -> None:
    result = quantize(Layout.GENAI, mode)
    assert count_ops(result.model)["GroupQueryAttention"] == 2
    if "8" in mode or "4" in mode or mode == "static":
        assert result.report.ops[0].quantized == 15
    assert_writes_the_same(Layout.GENAI, result, mode)


@pytest.mark.recent_ort
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        (Layout.FUSED, "static"),
        (Layout.STANDARD, "dynamic"),
        (Layout.STANDARD, "4 bits, float16"),
        (Layout.PLAIN, "static"),
        (Layout.MERGED, "static"),
        (Layout.MERGED, "4 bits, float16"),
    ],
)
def test_other_layouts(layout: Layout, mode: str) -> None:
    assert_writes_the_same(layout, quantize(layout, mode), mode)


def test_a_float16_decoder_stays_one_around_4_bits() -> None:
    result = quantize(Layout.GENAI, "4 bits, float16", half=True)
    # Those of the counts that GroupQueryAttention reads, and of the rows that are looked up in int8.
    assert count_ops(result.model)["Cast"] == 3
    assert_writes_the_same(Layout.GENAI, result, "4 bits, float16", half=True)


@pytest.mark.parametrize("layout", [Layout.GENAI, Layout.MERGED])
def test_weights_alone_need_no_samples(layout: Layout) -> None:
    result = onnxq.quantize(make_float(layout)[0], None, MODES["8 bits"], overrides=QUICK)
    assert_writes_the_same(layout, result, "8 bits")


def test_branches_of_a_merged_decoder_read_one_int8_weight() -> None:
    result = quantize(Layout.MERGED, "static")
    stored = {scope: [t.name for t in graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) == 2]
              for scope, graph in dict(walk_graphs(result.model.graph)).items()}  # fmt: skip
    assert len(stored[""]) == 15
    assert not stored["optimum::if.then_branch"]
    assert not stored["optimum::if.else_branch"]
    # Each branch dequantizes it for itself, beside its own activations, so that the kernels form in both.
    assert count_ops(optimize_graph(result.model))["MatMulIntegerToFloat"] == 30


def test_branches_of_a_merged_decoder_read_one_set_of_blocks() -> None:
    model, player = make_float(Layout.MERGED)
    config = load_config("ort-int4-weights", {"emit": "nbits"})
    result = onnxq.quantize(model, make_samples(player), config, overrides=QUICK)
    assert count_ops(result.model)["MatMulNBits"] == 30
    stored = {scope: sum(tensor.data_type == TensorProto.UINT8 for tensor in graph.initializer)
              for scope, graph in walk_graphs(result.model.graph)}  # fmt: skip
    # Integers and zero points.
    assert list(stored.values()) == [30, 0, 0]
    assert_writes_the_same(Layout.MERGED, result, "4 bits")


# ---- Decoders whose caches leave sizes open, as onnxruntime-genai's model builder declares them.

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


@pytest.mark.parametrize(("layout", "packed"), [(Layout.GENAI, False), (Layout.GENAI, True), (Layout.PLAIN, False)])
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


@pytest.mark.recent_ort
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
