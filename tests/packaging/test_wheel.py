"""A plain install: source archive, wheel, a fresh environment, another folder."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxq
from onnxq.kernels import host

ROOT = Path(__file__).resolve().parents[2]
CARRIED = (
    "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "onnxq", "configs",
    "cuda", "torch_frontend", "docs", "examples",
)  # fmt: skip

pytestmark = [pytest.mark.xdist_group("wheel"), pytest.mark.slow]


def _run(*command: str | Path, cwd: Path, code: int = 0, **more: str) -> str:
    # PYTHONPATH would let the checkout answer in the wheel's place.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of a copy, so that nothing stale in the checkout gets in."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    source.mkdir()
    for name in CARRIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    return work / _run(sys.executable, "-c", build, work, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """The wheel made from the source archive."""
    work = archive.parent
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    # Its library is compiled without optimization: a test of where it lies, not of its speed.
    hasty = work / "cxx"
    hasty.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    hasty.chmod(0o755)
    _run(*pip, "--wheel-dir", work, archive, cwd=work, CXX=str(hasty) if shutil.which("g++") else "no-such-compiler")
    return next(work.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `bin` folder of a fresh environment that holds the wheel; its dependencies are borrowed from this one."""
    home = tmp_path_factory.mktemp("venv") / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", home, cwd=wheel.parent)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    _run(*install, wheel, cwd=wheel.parent)
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    # A plain path line adds the folder without running the .pth files in it, so no editable onnxq comes along.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield home / "bin"
    shutil.rmtree(home)


def test_the_source_archive_carries_what_the_wheel_and_its_readers_need(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    folders = [path for folder in ("configs", "cuda", "docs") for path in (ROOT / folder).iterdir() if path.is_file()]
    wanted = {path.relative_to(ROOT).as_posix() for path in folders}
    assert wanted | {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "examples/digits/demo.py"} <= names
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []


def test_the_version_stands_in_one_place(archive: Path, wheel: Path) -> None:
    assert archive.name == f"onnxq-{onnxq.__version__}.tar.gz"
    # It holds a library for one platform where there is a compiler.
    assert wheel.name.startswith(f"onnxq-{onnxq.__version__}-py3-none-")
    assert wheel.name.endswith("-any.whl") == (shutil.which("g++") is None)
    files = [path for path in (*ROOT.glob("*.*"), *(ROOT / "onnxq").rglob("*.py")) if path.is_file()]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in files}
    assert sorted(name for name, text in texts.items() if onnxq.__version__ in text) == [
        "CHANGELOG.md",
        "onnxq/__init__.py",
    ]


def test_the_metadata_are_those_an_index_takes(archive: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        text = opened.read(f"onnxq-{onnxq.__version__}.dist-info/METADATA").decode("utf-8")
    fields = email.message_from_string(text)
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    pytest.importorskip("twine", reason="twine is not installed; `make wheel` runs it in an environment of its own")
    _run(sys.executable, "-m", "twine", "check", "--strict", archive, wheel, cwd=archive.parent)


def test_the_wheel_carries_what_it_should_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"onnxq_configs/{p.name}" for p in (ROOT / "configs").glob("*.yaml")} <= set(names)
    assert {f"onnxq_cuda/{p.name}" for p in (ROOT / "cuda").iterdir() if p.is_file()} <= set(names)
    assert {"onnxq/py.typed", "torch_frontend/qmodules/operators.yaml"} <= set(names)
    kinds = (".json", ".mjs")
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "onnxq").rglob("*") if path.suffix in kinds}
    assert {"onnxq/codes/catalogue.json", "onnxq/backends/web/serve.mjs"} <= data <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops - {"torch_frontend"} == {"onnxq", "onnxq_configs", "onnxq_cuda"}


def test_presets_load_by_name_anywhere(installed: Path, tmp_path: Path) -> None:
    code = """
import onnxq.config as config
names = config.list_presets()
assert all(config.read_config(name) for name in names)
print(config.__file__)
print(*names)
"""
    where, names = _run(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed.parent)
    assert names.split() == sorted(p.stem for p in (ROOT / "configs").glob("*.yaml"))


def test_out_of_a_zip_presets_are_read_or_refused(wheel: Path, tmp_path: Path) -> None:
    # Which of the two, depends on Python.
    code = "import onnxq\ntry: print(onnxq.load_config().target)\nexcept onnxq.OnnxqError as error: print(error.code)"
    assert _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(wheel)).strip() in ("ort", "Q301")


def test_kernel_sources_are_found_without_importing_cuda(installed: Path, tmp_path: Path) -> None:
    code = "from importlib import resources; print(*(f.name for f in resources.files('onnxq_cuda').iterdir()))"
    assert "README.md" in _run(installed / "python", "-c", code, cwd=tmp_path).split()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, so that the wheel has no kernels")
def test_the_wheel_brings_the_cpu_kernels(wheel: Path, installed: Path, tmp_path: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "/prebuilt/" in name]
    assert sorted(name.rpartition(".")[2] for name in names) == ["json", "so"]
    code = "from onnxq.kernels import host_library, host_reason; print(host_library(), host_reason())"
    own = {"CXX": "no-such-compiler", "ONNXQ_CACHE": str(tmp_path / "cache")}
    said = _run(installed / "python", "-c", code, cwd=tmp_path, **own)
    if not host._read_features() >= host._V3:
        pytest.skip("this processor is older than the wheel's library")
    code = "from onnxq.kernels import sources; print(sources.find_folder())"
    package = _run(installed / "python", "-c", code, cwd=tmp_path).strip()
    assert Path(said.split()[0]).parent == Path(package) / "prebuilt"


def test_the_command_works_anywhere(installed: Path, tmp_path: Path) -> None:
    assert _run(installed / "onnxq", "--version", cwd=tmp_path).split()[-1] == onnxq.__version__
    assert "quantize" in _run(installed / "onnxq", "--help", cwd=tmp_path)
    digits = ROOT / "examples" / "digits"
    command = [installed / "onnxq", "quantize", digits / "digits.onnx", "--data", digits / "digits.npz"]
    _run(*command, "--samples", "8", "-o", "small.onnx", cwd=tmp_path)
    assert (tmp_path / "small.onnx").stat().st_size < 0.5 * (digits / "digits.onnx").stat().st_size
