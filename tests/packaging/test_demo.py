"""`make demo` and the other targets: what they say while they work, and that the demo's sentence is its table's."""

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_demo", DIGITS / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


demo = _load()


def _agrees(text: str) -> None:
    """Raise unless the sentence says what the table's two rows say."""
    rows = re.findall(r"^(\w+) +(\d+) kB +([\d.]+)% +([\d.]+) ms$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == ["float32", "int8"]
    (size, small), (slow, fast) = ([float(row[k]) for row in rows] for k in (1, 3))
    said = re.search(r"int8 is ([\d.]+)x smaller and (SLOWER here: )?([\d.]+)x as fast", text)
    assert said[1] == f"{size / small:.1f}"
    assert said[3] == f"{slow / max(fast, 0.001):.2f}"
    assert bool(said[2]) == (fast > slow)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0.002, 500), st.floats(0.002, 500), st.floats(0, 1))
def test_the_sentence_says_what_the_table_says(size: int, small: int, slow: float, fast: float, right: float) -> None:
    before = demo.Row("float32", size, right, round(slow, 3))
    after = demo.Row("int8", small, right, round(fast, 3))
    _agrees(demo.describe(before, after, 540))


def test_the_demo_runs_and_measures_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "OUT", tmp_path / "out")
    monkeypatch.setattr(demo, "compare", partial(demo.compare, seconds=0.1))
    demo.main()
    text = capsys.readouterr().out
    _agrees(text)
    (float_size, float_right, _), (size, right, _) = re.findall(r"(\d+) kB +([\d.]+)% +([\d.]+) ms", text)
    assert int(float_size) == round((DIGITS / "digits.onnx").stat().st_size / 1e3)
    assert int(size) == round((tmp_path / "out" / "digits.q.onnx").stat().st_size / 1e3)
    assert min(float(float_right), float(right)) > 95


def _commands(target: str, folder: Path) -> list[str]:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    command = [make, "--dry-run", target, f"VENV={folder / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["demo", "lint", "wheel"])
def test_make_says_what_it_does_while_pip_works(tmp_path: Path, target: str) -> None:
    commands = _commands(target, tmp_path)
    installs = [k for k, line in enumerate(commands) if "pip install" in line]
    assert installs
    for k in installs:
        assert " -q" not in commands[k], f"nothing is seen of: {commands[k]}"
    assert any(line.startswith('echo "installing') for line in commands[: installs[0]])


@pytest.mark.parametrize("target", ["wheel", "release"])
def test_make_builds_both_archives_and_checks_them(tmp_path: Path, target: str) -> None:
    text = "\n".join(_commands(target, tmp_path))
    assert "-m build --outdir dist ." in text  # the source archive, and the wheel from it
    assert "-m twine check --strict dist/*" in text
