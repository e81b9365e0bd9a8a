"""The README's commands and programs run from top to bottom as they stand, in a folder that has only what they make.

What it shows of other tools' files is what is printed, and its figures are those of docs/results.md.
"""

import contextlib
import io
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxq.cli import cli
from onnxq.runtime import detect_cpu

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
# These install, or choose a Python: what they name is checked in test_docs.py and test_wheel.py.
INSTALLERS = ("make", "pip", ".")


@dataclass(frozen=True)
class Step:
    """One line of a shell, a program of Python, or lines that the steps before it printed.

    kind: sh, python or text. where: the prose in front of its block.
    """

    kind: str
    code: str
    where: str


def list_steps() -> Iterator[Step]:
    # Prose and blocks in turn, each block with its kind in front.
    prose, *rest = re.split(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)
    for kind, block, following in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        for code in block.splitlines() if kind == "sh" else [block]:
            if code.strip():
                yield Step(kind, code, prose)
        prose = following


STEPS = list(list_steps())


def run_line(line: str) -> str:
    """What a line of a shell prints. Commands of onnxq run in this process, since its imports take a second."""
    program, *arguments = shlex.split(line, comments=True)
    if program in INSTALLERS:
        return ""
    if program == "cd":
        os.chdir(arguments[0])
        return ""
    if program != "onnxq":
        return subprocess.run(["bash", "-ec", line], check=True, capture_output=True, text=True).stdout
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.output


def run_program(code: str) -> str:
    """What a program of Python prints."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(compile(code, "README.md", "exec"), {})
    return stream.getvalue()


def run_steps(steps: Sequence[Step]) -> Iterator[tuple[Step, str]]:
    """Each step that does something, with what it prints."""
    for step in steps:
        if step.kind != "text":
            yield step, run_line(step.code) if step.kind == "sh" else run_program(step.code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository as far as the README reads it, and the working directory."""
    # onnxruntime's tools warn there of models that were not preprocessed.
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "digits", tmp_path / "examples" / "digits")
    return tmp_path


# ONNX Runtime 1.23 has no Max of uint8, which files for `web` have.
@pytest.mark.slow
@pytest.mark.recent_ort
@pytest.mark.usefixtures("engines_here")
def test_all_of_it_runs_from_top_to_bottom(folder: Path) -> None:
    # An eighth of the samples takes a third of the time; the figures are the other test's.
    samples = folder / "examples" / "digits" / "digits.npz"
    np.savez(samples, image=np.load(samples)["image"][:16])
    printed = list(run_steps(STEPS))
    assert len(printed) > 30
    # The program of "In Python" shows the table of the command, and its own lines.
    (program,) = (text for step, text in printed if "onnxq.summarize" in step.code)
    assert "verdict " in program
    assert "\nlogits " in program
    work = Path.cwd()
    assert work.parent.parent == folder
    # The plan of small.onnx, on the same network exported again.
    assert onnx.load("again.q.onnx").graph == onnx.load("small.onnx").graph
    assert os.path.getsize("net.q.onnx") < os.path.getsize("model.onnx") / 2
    assert {"model.q.onnx", "model.int8.bits.onnx", "trt.json", "hub"} <= set(os.listdir(work))


def is_printed(line: str, printed: list[str]) -> bool:
    """True where a line is printed so, but for three percent of each figure that is measured; … stands for anything."""
    pieces = re.split(r"(-?\d+\.\d+)", line)
    shown = [float(piece) for piece in pieces[1::2]]
    texts = (re.escape(piece).replace("…", ".*") for piece in pieces[::2])
    pattern = r"(-?\d+\.\d+)".join(texts)
    matches = (re.fullmatch(pattern, text) for text in printed)
    return any(match and np.allclose([float(text) for text in match.groups()], shown, rtol=0.03) for match in matches)


@pytest.mark.slow
@pytest.mark.recent_ort
@pytest.mark.usefixtures("folder")
def test_what_is_shown_is_what_is_printed() -> None:
    shown = [step for step in STEPS if step.kind == "text"]
    last = max(STEPS.index(step) for step in shown)
    printed = [line.rstrip() for _, text in run_steps(STEPS[:last]) for line in text.splitlines()]
    assert len(shown) == 3
    for step in shown:
        if "CPU without VNNI" in step.where and detect_cpu() != "avx2":
            continue
        assert [line for line in step.code.splitlines() if not is_printed(line, printed)] == []


def test_its_figures_are_those_of_the_results() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:-1] for line in TEXT.splitlines() if re.match(r"\| [A-Z].*\d", line)]
    assert len(rows) == 4
    section = results[results.index("## Beside every peer, in one run") :].split("\n## ")[0]
    cells = [[cell.split(" / ")[0].strip(" *") for cell in line.split("|")[3:-1]] for line in section.splitlines()]
    for values in rows:
        _, *ours = [value.strip(" *") for value in values]
        # Without `fast`, the first column there.
        assert ours in cells, ours
        assert values[0].strip() in results
