"""The house rules a machine can check beside the figures of benchmarks/house.py: owners of libraries, imports."""

import ast
import os
import subprocess
import sys

import pytest

from tests.sources import ROOT, SOURCES, list_imports, list_nodes, name_source

# Who alone may import a library, lazily or not. ruff bans them elsewhere too; it cannot tell one owner from another.
OWNERS = {
    "onnx_graphsurgeon": "onnxq/graph/",
    "onnxruntime": "onnxq/runtime/",
    "yaml": "onnxq/config/",
    "pydantic": "onnxq/config/",
    "pydantic_core": "onnxq/config/",
    "click": "onnxq/cli/",
    "filelock": "onnxq/files/",
    "threadpoolctl": "onnxq/numerics/",
    "rich": "onnxq/report/",
    "PIL": "onnxq/data/",
    "onnxruntime_qnn": "onnxq/backends/qnn/",
    "openvino": "onnxq/backends/openvino/",
    "polygraphy": "onnxq/backends/trt/",
    "tensorrt": "onnxq/backends/trt/",
    "tensorrt_rtx": "onnxq/backends/trt/",
    "torch": "torch_frontend/",
    "torch_frontend": "torch_frontend/",
}
OPTIONAL = ("onnxruntime", "onnxruntime_qnn", "openvino", "torch", "PIL", "polygraphy", "tensorrt", "tensorrt_rtx")


def test_every_outside_library_has_one_owner() -> None:
    trespassers = [
        f"{name_source(path)}:{line} imports {module}, which belongs to {owner}"
        for path in SOURCES
        for line, module in list_imports(path)
        if (owner := OWNERS.get(module.split(".")[0])) and not name_source(path).startswith(owner)
    ]
    assert trespassers == []


def test_cuda_hides_nobodys_namespace() -> None:
    assert not (ROOT / "cuda" / "__init__.py").exists()


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_room_imports_without_the_optional_packages() -> None:
    code = f"""
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import onnxq
for found in pkgutil.walk_packages(onnxq.__path__, "onnxq."):
    if not found.name.endswith("__main__"):
        print(importlib.import_module(found.name).__name__)
"""
    modules = _python(code).split()
    rooms = {path.parent.name for path in (ROOT / "onnxq").glob("*/__init__.py")}
    assert {f"onnxq.{room}" for room in rooms} <= set(modules)


HEAVY = ("torch", "onnxruntime", "onnx", "onnx_graphsurgeon", "pydantic", "yaml", "rich")
LOADED = f"import sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"


@pytest.mark.parametrize(
    "doing",
    [
        pytest.param("import onnxq", id="import"),
        pytest.param("import onnxq; dir(onnxq); onnxq.__all__", id="dir"),
        pytest.param(
            "import contextlib, io\nfrom onnxq.cli import cli\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): cli.main(['--help'])",
            id="help",
        ),
    ],
)
def test_the_first_step_loads_nothing_heavy(doing: str) -> None:
    assert _python(f"{doing}\n{LOADED}").split() == []


def _cpu_seconds(*command: str) -> float:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="no wait4 on this system")
def test_help_answers_at_once() -> None:
    """Processor time, the best of five: the clock on the wall also counts who else is at work."""
    ask = (sys.executable, "-m", "onnxq.cli", "--help")
    assert min(_cpu_seconds(*ask) for _ in range(5)) < 0.3


# ---- Plain prose, as far as a machine can check it: docstrings begin with their subject or verb.

ROOMS = (
    "codes", "config", "data", "errors.py", "files", "kernels", "numerics", "observers", "progress.py",
    "report", "sites.py", "spec.py", "wording.py",
)  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_with_a_question_word(room: str) -> None:
    place = ROOT / "onnxq" / room
    begins = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}"
        for path in (place.rglob("*.py") if place.is_dir() else [place])
        for node in list_nodes(path)
        if isinstance(node, DOCUMENTED)
        and (ast.get_docstring(node) or "x").split()[0].rstrip(",") in ("What", "Which", "Who", "Where", "How", "Why")
    ]
    assert begins == []
