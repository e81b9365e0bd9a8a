"""The programs of docs/extending.md run as they stand and do what the text says of them."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import onnxq
from onnxq import backends
from onnxq.errors import CalibrationError
from onnxq.interop import registry as formats
from onnxq.interop.base import TensorScale
from onnxq.observers import base as observers
from onnxq.passes import registry
from onnxq.passes.rounding import strategies

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")}
COMMON = re.findall(r"```python\n(.*?)```", TEXT.partition("\n## ")[0], re.DOTALL)


def read_blocks(title: str) -> list[str]:
    """The programs of a section."""
    return re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL)


def run_section(title: str, *before: str) -> dict[str, Any]:
    """Names that a section's program leaves behind."""
    module = ModuleType("extending")
    sys.modules[module.__name__] = module  # torch.fx looks functions up by their module
    blocks = read_blocks(title)
    assert blocks, title
    exec(compile("\n".join([*before, *blocks]), f"docs/extending.md: {title}", "exec"), module.__dict__)
    return module.__dict__


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a program registers is left afterwards."""
    monkeypatch.setattr(observers, "_REGISTRY", dict(observers._REGISTRY))
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS)
    monkeypatch.setattr(registry, "PASSES", registry.PASSES)
    monkeypatch.setattr(strategies, "STRATEGIES", strategies.STRATEGIES)
    before = dict(backends.BACKENDS)
    yield
    backends.BACKENDS.clear()
    backends.BACKENDS.update(before)
    sys.modules.pop("extending", None)


def test_every_extension_has_its_program() -> None:
    assert [title for title, part in SECTIONS.items() if "```python" not in part] == []


def test_an_observer_of_your_own() -> None:
    ends = [255 * scale for scale in run_section("An observer", *COMMON)["scales"].values()]
    assert ends
    assert all(any(np.isclose(end, share * 2.0**k) for k in range(8) for share in (1, 2)) for end in ends)


def test_a_target_of_your_own() -> None:
    found = run_section("A target", *COMMON)
    assert {site.rule for site in found["plan"].sites} == {"conv"}
    assert not found["plan"].refusals
    assert found["again"].model == found["result"].model


def test_a_pass_of_your_own() -> None:
    found = run_section("A pass")
    assert [node.op_type for node in found["result"].model.graph.node] == ["Relu", "Neg"]
    assert "second_relus" in found["result"].plan.prepare
    again = onnxq.apply(found["twice"], found["result"].plan, overrides={"latency": False})
    assert again.model == found["result"].model


def test_an_import_format_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "FORMATS", formats.FORMATS)
    found = run_section("An import format", *COMMON)
    assert {site.name: site.scale for site in found["imported"].matched} == {"x": 0.03125, "r": 0.0625}
    origins = {site.qparams.origin for site in found["imported"].plan.sites if site.qparams is not None}
    assert "my magnitudes" in origins
    (tmp_path / "wrong.json").write_bytes(found["write_magnitudes"]([TensorScale("x", 0.0)]))
    with pytest.raises(CalibrationError, match="line 1: x has no range"):
        onnxq.import_calibration("wrong.json", found["model"])


def test_a_rounding_strategy_of_your_own() -> None:
    found = run_section("A rounding strategy", *COMMON)
    assert found["rounded"]
    assert all(shape == (1, 32, 288) for shape in found["rounded"])
    assert any("2 Conv: 2 rounded" in line for line in found["result"].report.accounts), found["result"].report.accounts


def test_a_quantizer_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch_frontend.quantizers import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    found = run_section("A quantizer")
    assert len(found["gradients"]) == 2
    assert all(grad is not None and grad.isfinite().all() for grad in found["gradients"].values())


def test_a_quantized_module_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch_frontend.qmodules import registry

    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    found = run_section("A quantized module")
    sites = list(found["quantized"].quantizers)
    assert [site for site in sites if site.endswith(".weight")] == ["first.weight", "second.weight"]
    assert isinstance(found["quantized"].model.get_submodule("gated"), found["Gated"])
