"""The benchmarks that compare tools and passes: who is compared with whom, and that one command makes the table."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxq.passes.base import Stage
from onnxq.passes.registry import PASSES
from onnxq.passes.rounding.layerwise import AUGMENTED
from tests.networks import parse_text

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("language_model", "measure", "corpus", "subjects", "peers", "peer_tools", "ablation", "gpu", "shapes")
SCORER = """
import json, sys
name, *rest = sys.argv[1:]
if name == "--calib":
    import numpy, shutil
    shutil.copy(__file__.replace("evaluate.py", "data.npz"), rest[1])
else:
    print(json.dumps({"main": 0.5, "sqnr_db": 20.0}))
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts as modules."""
    monkeypatch.syspath_prepend(FOLDER)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One small network with its samples, and a scorer."""
    rng = np.random.default_rng(0)
    model = parse_text(
        """g (float[N, 3, 16, 16] x) => (float[N, 8, 16, 16] y) {
        h = Conv<pads = [1, 1, 1, 1]>(x, v) r = Relu(h) y = Conv<pads = [1, 1, 1, 1]>(r, w) }""",
        v=rng.normal(0, 0.3, (16, 3, 3, 3)).astype(np.float32),
        w=rng.normal(0, 0.3, (8, 16, 3, 3)).astype(np.float32),
    )
    (tmp_path / "models").mkdir()
    onnx.save(model, tmp_path / "models" / "small.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(0, 1, (24, 3, 16, 16)).astype(np.float32))
    (tmp_path / "evaluate.py").write_text(SCORER, encoding="utf-8")
    return tmp_path


def printed(script: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_pass_that_improves_accuracy_is_left_out_once(tools: SimpleNamespace) -> None:
    every = (*tools.ablation.ACCURACY, *tools.ablation.FEW_BITS, *tools.ablation.BUDGET)
    passes = {entry.name for entry in PASSES if entry.stage is not Stage.REWRITE} | {AUGMENTED}
    # Repeated attempts of passes that can be left out, and choices of the configuration.
    again = {"attention", "attention_after_rounding", "rounding_after_promotion", "low_bit_search", "external_rounding"}
    again |= {"high_precision", "embeddings", "dynamic_scales", "float_ops"}
    # For language models, of which the corpus has none, and for effort `high`.
    again |= {"rotation", "bias_absorption"}
    # On request, for transformers.
    again |= {"token_scales"}
    # For targets that compute in two widths.
    again |= {"activation_bits", "wide_activations"}
    assert sorted(every) == sorted(passes - again)


def test_every_peer_has_its_child(tools: SimpleNamespace) -> None:
    others = {row.tool for row in tools.language_model.ROWS if row.tool}
    assert set(tools.peers.PACKAGES) | others == set(tools.peer_tools.TOOLS)
    assert set(tools.peers.DEFAULT) <= set(tools.peers.PACKAGES)


def test_the_fastest_is_among_those_that_quantized_into_a_file_that_runs(tools: SimpleNamespace) -> None:
    def row(tool: str, seconds: float, operators: int, error: str = "") -> object:
        made = tools.measure.Run(0, seconds, 1.0, "", seconds / 2)
        return tools.peers.Row(tool, made, tools.subjects.Score(0.5, 20.0, error), operators)

    ours = row("onnxq balanced", 6.0, 9)
    rows = [ours, row("idle", 1.0, 0), row("broken", 1.5, 9, "refused"), row("slow", 4.0, 9), row("good", 3.0, 9)]
    said = tools.peers.beside(rows, "onnxq balanced")
    assert "takes 2.0 times as long (CPU time 2.0) as the fastest peer, good" in said
    assert "as idle, and no peer quantized anything" in tools.peers.beside(rows[:3], "onnxq balanced")
    assert tools.peers.beside([ours], "onnxq balanced").endswith("no peer made a file that runs")


def test_a_report_is_found_among_lines_of_progress(tools: SimpleNamespace) -> None:
    found = tools.subjects.report_in('sweeping: 3/4\n{"checks": [{"sqnr_db": [30, 20], "optimized": true}]}\ndone\n')
    assert tools.subjects.held_back(found) == 20
    found["checks"].append({"sqnr_db": [10, None], "optimized": False})
    assert tools.subjects.held_back(found) == 10


def test_one_run_gives_a_table_of_tools(corpus: Path) -> None:
    pytest.importorskip("sympy", reason="what onnxruntime's own preprocessing needs")
    text = printed("peers.py", "small", "--corpus", corpus, "--efforts", "fast", "--peers", "ort-minmax", "--peer",
                   f"nncf={corpus / 'none'}", "--memory", "40", "--out", corpus / "out")  # fmt: skip
    lines = text.splitlines()
    assert lines[0].startswith("| small (float 0.5000) | metric | SQNR dB | seconds |")
    assert [line.split(" ")[1] for line in lines[2:5]] == ["onnxq", "ort-minmax", "nncf"]
    assert "| 0.5000 | 20.0 |" in lines[2]
    assert "failed: OSError" in lines[4]
    assert "as the fastest peer, ort-minmax" in text
    assert "| 40 |" in text


def test_accuracy_requests_are_checked_on_fresh_data(corpus: Path) -> None:
    config = corpus / "all.yaml"
    config.write_text("extends: ort-int8\neffort: fast\nrules:\n  - {op: '*', set: {quantize: true}}\n")
    (corpus / "data").mkdir()
    with np.load(corpus / "data.npz") as stored:
        np.savez(corpus / "data" / "small.npz", **{"calib/x": stored["x"][:4], "eval/x": stored["x"][4:]})
    text = printed("accuracy_requests.py", "small:90,-20", "--corpus", corpus, "--samples", "8", "--fresh", "10",
                   "--config", config, "--out", corpus / "out")  # fmt: skip
    given, relative = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:])
    assert (given[:2], given[4:6]) == (["small", "90"], ["yes", "0 of 2"])
    assert given[2].endswith("not held")
    assert int(relative[1]) == round(float(relative[8])) - 20
    assert float(relative[3]) > float(relative[1])
    with np.load(corpus / "out" / "small.0.npz") as first, np.load(corpus / "out" / "small.1.npz") as second:
        assert first["x"].shape == second["x"].shape == (8, 3, 16, 16)
        assert not np.array_equal(first["x"], second["x"])


@pytest.mark.trt
@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="no tensorrt-rtx")
def test_one_command_gives_kernels_on_tensorrt_and_writes_them_into_a_page(corpus: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n<!-- rows: begin -->\nold\n<!-- rows: end -->\nend\n")
    net = f"{corpus / 'models' / 'small.onnx'}={corpus / 'data.npz'}"
    text = printed("gpu.py", net, "--files", "float32", "modelopt", "onnxq", "--peer", f"modelopt={corpus / 'none'}",
                   "--engine", "tensorrt-rtx", "--batches", "2", "--effort", "fast", "--seconds", "0.2", "--out",
                   corpus / "out", "--write", page)  # fmt: skip
    assert "| small | 2 | float32 | 2 float32 |" in text
    assert "| small | 2 | onnxq | 2 int8 |" in text or "| small | 2 | onnxq | 1 int8, 1 float32 |" in text
    assert "| small | 2 | modelopt | " in text
    written = page.read_text()
    assert written.startswith("# A page\n<!-- rows: begin -->\nTensorRT for RTX ")
    assert written.endswith("<!-- rows: end -->\nend\n")
    assert "old" not in written


@pytest.mark.parametrize("name", ["resnet50", "vit_b", "bert_base"])
def test_the_shapes_are_there(tools: SimpleNamespace, name: str) -> None:
    assert name in tools.shapes.SHAPES
    assert set(tools.gpu.SHAPES) == set(tools.shapes.SHAPES)


def test_one_command_gives_a_table_of_passes_for_both_targets(corpus: Path) -> None:
    net = f"{corpus / 'models' / 'small.onnx'}={corpus / 'data.npz'}"
    text = printed("ablation.py", net, "--passes", "rounding", "promotion", "--out", corpus / "out")
    for target in ("ort", "trt"):
        assert f"| {target}-int8, balanced | small |" in text
    assert text.count("| everything on |") == 2
    assert "Without effect here: promotion" in text
