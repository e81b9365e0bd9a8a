"""Language models on a text, as a table and as JSON."""

import json
from dataclasses import replace

from onnxq.commands.results import show, write_json
from onnxq.evaluation.perplexity import LanguageScore, Perplexity
from tests.report.kit import shown

FOUND = Perplexity(
    models=(
        LanguageScore(
            name="float.onnx", size=24_000_000, perplexity=3.5, bits_per_byte=1.807, agreement=1.0, divergence=0.0,
            caches=True, generated=50.0, prompt=51000.0, generation=1700.0,
        ),
        LanguageScore(
            name="plain.q.onnx", size=4_000_000, perplexity=float("inf"), bits_per_byte=2.0, agreement=0.987,
            divergence=0.0123, caches=False, generated=41.25, prompt=20000.0, generation=8.25,
        ),
    ),
    windows=10, tokens=2550, length=256, prompts=8, generate=50, threads=1, device="vnni", data="test.txt",
)  # fmt: skip


def test_the_table() -> None:
    text = shown(show, FOUND, width=None)
    rows = [line.split() for line in text.splitlines()]
    assert ["float.onnx", "24.0", "MB", "3.5", "1.8070", "100.00%", "0", "50.0", "51000", "1700"] in rows
    assert ["plain.q.onnx", "4.0", "MB", "inf", "2.0000", "98.70%", "0.012", "41.2", "20000", "8.2"] in rows
    assert "x86 with VNNI, 1 thread" in text
    assert "test.txt: 2550 tokens in 10 windows of at most 256" in text
    assert "without caches, so that each costs a run of all before it: plain.q.onnx" in text


def test_what_was_not_measured_has_no_column_and_json_is_strict() -> None:
    models = tuple(replace(one, generated=None, prompt=None, generation=None) for one in FOUND.models[:1])
    text = shown(show, replace(FOUND, models=models, generate=0), width=None)
    assert "prompt/s" not in text
    assert "tokens before the first" not in text
    assert json.loads(write_json(FOUND))["models"][1]["perplexity"] == "inf"
