"""Variants, as a table and as JSON."""

import json
import math
from dataclasses import replace

from onnxq.commands.results import show, write_json
from onnxq.commands.variants.result import FLOAT, Variant, Variants, VariantState, find_no_variant
from onnxq.sites import Caution
from tests.commands.test_bench import latency
from tests.report.kit import shown, warned

ORIGINAL = Variant(dtype=FLOAT, file="hub/onnx/m.onnx", size_bytes=4_000_000, latency=latency(2.0), metric=0.9)
HALF = Variant(
    dtype="fp16", file="hub/onnx/m_fp16.onnx", preset="ort-int8", settings={"mode": "float"}, size_bytes=2_000_000,
    sqnr_db=(70.0, math.inf), latency=latency(4.0), metric=0.9,
)  # fmt: skip
FOUND = Variants(
    source="models/m.onnx",
    original=ORIGINAL,
    variants=(
        HALF,
        Variant(dtype="int8", state=VariantState.NO_SAMPLES),
        Variant(
            dtype="q4", state=VariantState.LOST, size_bytes=1_000_000, sqnr_db=(8.0, 7.5), latency=latency(1.0),
            metric=0.125, warnings=(Caution("W109", "one output drifts"),),
        ),
        Variant(dtype="q4f16", state=VariantState.FAILED, reason="node 'a': has no kernel"),
    ),
    metric="evaluate.py:accuracy",
    checked=2,
    data="samples.npz: 16 samples",
    synthetic=False,
    seed=0,
    cpu="vnni",
    shapes={"x": (1, 192)},
    versions={},
)  # fmt: skip


def test_the_table() -> None:
    text = shown(show, FOUND, width=None)
    title, columns, *rows = text.splitlines()
    assert title == "m.onnx -> hub/onnx  (x86 with VNNI, all threads, x 1x192, SQNR on 2 samples)"
    assert " ".join(columns.split()) == "variant file size smaller latency faster SQNR evaluate.py:accuracy"
    assert [" ".join(row.split()) for row in rows[:5]] == [
        "fp32 m.onnx 4.0 MB 1.0× 2.00 ms 1.00× 0.9",
        "fp16 m_fp16.onnx 2.0 MB 2.0× 4.00 ms 0.50× 70.0 dB 0.9",
        "int8 NO SAMPLES",
        "q4 1.0 MB 4.0× 1.00 ms 2.00× 7.5 dB 0.125 ANSWERS LOST (left out)",
        "q4f16 FAILED",
    ]
    assert "left out  q4f16: node 'a': has no kernel" in text
    assert text.endswith("warning[W109]: q4: one output drifts\n")


def test_files_that_are_kept_all_the_same_or_have_the_same_bytes_are_marked() -> None:
    kept = replace(FOUND.variants[2], file="hub/onnx/m_q4.onnx")
    text = shown(show, replace(FOUND, variants=(kept,)), width=None)
    assert "ANSWERS LOST\n" in text
    twin = replace(FOUND.variants[0], dtype="q8", same_as="fp16")
    text = shown(show, replace(FOUND, variants=(FOUND.variants[0], twin)), width=None)
    assert text.count("the same file as fp16\n") == 1


def test_json_names_files_and_not_places() -> None:
    document = json.loads(write_json(FOUND))
    assert document["source"] == "m.onnx"
    assert list(document["variants"]) == ["fp32", "fp16", "int8", "q4", "q4f16"]
    half = document["variants"]["fp16"]
    assert (half["file"], half["settings"]) == ("m_fp16.onnx", {"mode": "float"})
    assert half["sqnr_db"] == {"file": 70, "ort": "inf"}
    assert (half["speedup"], half["latency"]) == (0.5, {"median_ms": 4.0, "threads": 0})
    assert (document["variants"]["int8"]["sqnr_db"], document["variants"]["int8"]["state"]) == (None, "no samples")


def test_one_usable_variant_is_enough_and_made_up_inputs_are_told() -> None:
    assert find_no_variant(FOUND) is None
    error = find_no_variant(replace(FOUND, variants=FOUND.variants[1:]))
    assert error is not None
    assert "int8: its ranges come from samples, and none were given; q4: answers lost; q4f16: node 'a'" in error.cause
    assert "warning[W101]" in warned(show, replace(FOUND, synthetic=True), as_json=True)[1]
