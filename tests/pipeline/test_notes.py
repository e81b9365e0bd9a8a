"""The file to ship: what commands can still do with one whose notes were left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnxq
from onnxq.errors import ModelError
from tests.pipeline.models import EVERYTHING, images, residual

FAST = {"effort": "fast", "latency": False}
LEVELS = ["names", "none"]


@pytest.fixture(scope="module")
def full() -> onnxq.Result:
    return onnxq.quantize(residual(), images(), EVERYTHING, overrides=FAST)


def quantize(level: str, **more: Any) -> onnxq.Result:
    return onnxq.quantize(residual(), images(), EVERYTHING, overrides={**FAST, **more, "notes": level})


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_without_notes_is_smaller_and_inspected_alike(full: onnxq.Result, level: str, tmp_path: Path) -> None:
    out = tmp_path / "m.q.onnx"
    overrides = {**FAST, "notes": level, "plan_out": tmp_path / "plan.json"}
    made = onnxq.quantize(residual(), images(), EVERYTHING, overrides=overrides, out=out)
    assert made.plan == full.plan
    assert made.report.output_bytes == out.stat().st_size < 0.8 * full.report.output_bytes
    one, other = (onnxq.inspect(proto).pairs for proto in (full.model, out))
    assert [(pair.site, pair.bits, pair.role, pair.ops) for pair in other] == [
        (pair.site, pair.bits, pair.role, pair.ops) for pair in one
    ]
    # The plan lies beside it, and makes the same file again.
    again = onnxq.apply(residual(), tmp_path / "plan.json", overrides={"notes": level})
    assert again.model.SerializeToString() == out.read_bytes()


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_compared_profiled_and_proved(full: onnxq.Result, level: str) -> None:
    both = (full.model, quantize(level).model)
    wanted = {"samples": 2, "layers": True}
    layers = [onnxq.diff(residual(), proto, images(), overrides=wanted).layers for proto in both]
    assert layers[0] == layers[1]
    wanted = {"samples": 2, "by": ("node",)}
    assert len({onnxq.profile_model(residual(), proto, images(), overrides=wanted).groups for proto in both}) == 1
    proofs = [onnxq.prove(proto, overrides={"engine": "ort"}) for proto in both]
    assert len({tuple(kernel.kind for kernel in proof.kernels) for proof in proofs}) == 1
    assert len({tuple((site.site, site.state) for site in proof.sites) for proof in proofs}) == 1
    bare = both[1]
    with pytest.raises(ModelError, match="already quantized"):
        onnxq.quantize(bare, images(), EVERYTHING, overrides=FAST)


def test_the_attribute_bits_leaves_no_notes_either() -> None:
    model = quantize("none", bits_attribute=True).model
    bits = [{a.name: a.i for a in node.attribute}["bits"] for node in model.graph.node if "Linear" in node.op_type]
    assert set(bits) == {8, 32}
    assert not model.metadata_props
    assert not any(node.name or node.metadata_props for node in model.graph.node)


def test_variants_are_written_without_them(tmp_path: Path) -> None:
    overrides = {**FAST, "only": "int8", "notes": "names"}
    onnxq.variants(residual(), images(), config=write(tmp_path), overrides=overrides, out=tmp_path)
    made = onnx.load(tmp_path / "onnx" / "model_int8.onnx")
    assert [entry.key for entry in made.metadata_props] == ["onnxq.bits"]
    assert all(set(one) == {"bits"} for one in json.loads(made.metadata_props[0].value).values())
    assert all(node.name and not node.metadata_props for node in made.graph.node)


def write(folder: Path) -> Path:
    """A configuration that quantizes nets as small as these."""
    (folder / "all.yaml").write_text("rules: [{op: '*', set: {quantize: true}}]\n")
    return folder / "all.yaml"
