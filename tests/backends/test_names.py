"""Names of engines stand in the folder of their backend, in presets, and nowhere else."""

import re

import pytest

from onnxq.backends import list_backends, list_engines
from tests.sources import ROOT, SOURCES, list_imports, list_texts, name_source

OWN = tuple(backend.name for backend in list_backends())
# Engines to come, too.
NAMES = {*OWN, *list_engines(), "openvino", "qnn", "web"}
QUOTED = re.compile("|".join(rf"[\"'`]{re.escape(name)}[\"'`]" for name in sorted(NAMES)))
# As a word of a text; names of presets begin with one. "web" is a word, and "openvino" a provider of ONNX Runtime too.
WORD = re.compile(
    "|".join(rf"(?<![\w./-]){re.escape(name)}(?![\w./-])" for name in sorted(NAMES - {"web", "openvino"}))
)
# Other tools' vocabulary.
ALLOWED = {
    # Sparsebit's words for its backends, and ours for them: read below the room of backends.
    "onnxq/config/sparsebit.py",
    # What the names in TensorRT's calibration cache stand for.
    "onnxq/interop/base.py",
    # A key of MQBench's files.
    "onnxq/interop/tensorrt.py",
}


# All modules outside the room of backends.
MODULES = {name_source(path): path for path in SOURCES if not path.is_relative_to(ROOT / "onnxq" / "backends")}


def test_no_engine_is_named_outside_its_folder() -> None:
    found = {}
    for name in MODULES.keys() - ALLOWED:
        lines = [line for line in MODULES[name].read_text(encoding="utf-8").splitlines() if QUOTED.search(line)]
        if lines:
            found[name] = lines
    assert found == {}


def test_no_text_names_an_engine() -> None:
    """Options and messages ask the registry for names; examples of commands have to write one."""
    names = MODULES.keys() - ALLOWED - {"onnxq/cli/commands.py", "onnxq/cli/analysis.py"}
    found = {name: [text for _, text in list_texts(MODULES[name]) if WORD.search(text)] for name in names}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("own", OWN)
def test_no_module_imports_a_folder_of_another_engine(own: str) -> None:
    """Generic code asks the registry."""
    folder = f"onnxq.backends.{own}"
    importers = [
        path.name
        for path in SOURCES
        if path.is_relative_to(ROOT / "onnxq") and not path.is_relative_to(ROOT / "onnxq" / "backends" / own)
        for _, module in list_imports(path)
        if module == folder or module.startswith(f"{folder}.")
    ]
    assert importers == []
