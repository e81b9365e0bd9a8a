"""perplexity(): figures as numpy computes them from whole runs, of models with caches and without."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.commands.results import show, write_json
from onnxq.errors import DataError
from onnxq.evaluation.perplexity import LanguageScore, Perplexity
from onnxq.graph import name_nodes
from onnxq.graph.precision.narrow import write_types
from onnxq.runtime import Session
from tests.cli.kit import read
from tests.data.text.kit import make_decoder, make_text
from tests.report.kit import shown

ASKED = {"tokenizer": "bytes", "sequence_length": 32, "generate": 4, "prompts": 2, "latency": False}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_bytes(make_text(8))
    return file


def log_chances(model: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    logits = Session(model).run({"input_ids": ids[None]})["logits"][0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_figures_are_those_of_whole_runs(path: Path) -> None:
    plain, noisy = make_decoder(caches=False), make_decoder(caches=False, noise=0.1)
    found = onnxq.perplexity([plain, make_decoder(noise=0.1), noisy], path, overrides=ASKED)
    text = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
    nats, same, divergence, tokens = 0.0, 0, 0.0, 0
    for start in range(0, len(text), 32):
        ids = text[start : start + 32]
        a, b = (log_chances(one, ids)[:-1] for one in (plain, noisy))
        nats -= b[np.arange(len(ids) - 1), ids[1:]].sum()
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        divergence += (np.exp(a) * (a - b)).sum()
        tokens += len(ids) - 1
    assert found.tokens == tokens
    first, cached, other = found.models
    assert (first.agreement, first.divergence, first.generated) == (1, 0, 4)
    assert (cached.caches, other.caches) == (True, False)
    for one in (cached, other):
        assert one.perplexity == pytest.approx(np.exp(nats / tokens), rel=1e-4)
        assert one.bits_per_byte == pytest.approx(nats / tokens / np.log(2), rel=1e-3)
        assert one.agreement == pytest.approx(same / tokens, abs=0.01)
        assert one.divergence == pytest.approx(divergence / tokens, rel=1e-3)
        assert one.generated is not None
        assert 0 <= one.generated <= 4


def test_windows_of_several_blocks_in_a_model_of_prompts_and_single_tokens(path: Path) -> None:
    settings = {"tokenizer": "bytes", "sequence_length": 100, "latency": False}
    found = onnxq.perplexity([make_decoder(caches=False), make_decoder(in_steps=False)], path, overrides=settings)
    assert found.models[1].divergence == pytest.approx(0, abs=1e-6)
    assert found.models[1].agreement > 0.99


def test_a_model_in_bfloat16_is_run_in_float32(path: Path) -> None:
    """ONNX Runtime's CPU provider has no kernels for it, nor hands numpy any."""
    plain, kind = name_nodes(make_decoder()), int(onnx.TensorProto.BFLOAT16)
    caches = [f"{part}.0.{name}" for part in ("past_key_values", "present") for name in ("key", "value")]
    for interface in ({}, dict.fromkeys(("logits", *caches), kind)):
        typed = write_types(plain, kind, (), interface=interface)
        first, other = onnxq.perplexity([plain, typed], path, overrides=ASKED).models
        assert other.divergence == pytest.approx(0, abs=1e-2)
        assert other.size < first.size


def test_the_command_shows_the_models_and_their_rates(path: Path) -> None:
    files = []
    for name, model in (("float", make_decoder()), ("other", make_decoder(noise=0.1))):
        onnx.save(model, path.with_name(f"{name}.onnx"), save_as_external_data=name == "other", size_threshold=64)
        files.append(str(path.with_name(f"{name}.onnx")))
    options = "--tokenizer bytes --samples 2 --prompts 1 --sequence-length 16 --generate 2"
    found = read("perplexity", *files, "--data", path, *options.split())
    assert (found["windows"], found["tokens"], found["length"]) == (2, 30, 16)
    assert [one["name"] for one in found["models"]] == files
    assert all(one["prompt"] > 0 and one["generation"] > 0 for one in found["models"])
    sizes = [one["size"] for one in found["models"]]
    # The second model's weights lie beside it.
    assert sizes[1] > Path(files[1]).stat().st_size + 256 * 8 * 4


def test_models_and_texts_that_do_not_belong_together(path: Path) -> None:
    few = make_decoder(caches=False, tokens=64)
    for text, models, options, said in (
        (bytes(range(60)), [make_decoder(), few], ASKED, "gives 64 logits"),
        (b"a", make_decoder(), ASKED, "has no token that another one predicts"),
        (b"a", make_decoder(), None, "no tokenizer was given"),
    ):
        path.write_bytes(text)
        with pytest.raises(DataError, match=said):
            onnxq.perplexity(models, path, overrides=options)


# ---- Language models on a text, as a table and as JSON.

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
