"""The file to ship: what commands can still do with one whose notes were left out."""

import json
from pathlib import Path

import onnx
import pytest

import onnxq
from onnxq.errors import ModelError
from tests.pipeline.models import EVERYTHING, images, quantize, residual
from tests.processes import build_here


def read(proto: onnx.ModelProto) -> list[object]:
    """The results of all commands that read the notes of a quantized model."""
    pairs = [(pair.site, pair.bits, pair.role, pair.ops) for pair in onnxq.inspect(proto).pairs]
    layers = onnxq.diff(residual(), proto, images(), overrides={"samples": 2, "layers": True}).layers
    groups = onnxq.profile_model(residual(), proto, images(), overrides={"samples": 2, "by": ("node",)}).groups
    with build_here():
        proof = onnxq.prove(proto, overrides={"engine": "ort"})
    kinds, states = [kernel.kind for kernel in proof.kernels], [(site.site, site.state) for site in proof.sites]
    return [pairs, layers, groups, kinds, states]


@pytest.fixture(scope="module")
def full() -> tuple[onnxq.Result, list[object]]:
    """A result with all notes, and what is read in it."""
    result = quantize(residual(), images())
    return result, read(result.model)


@pytest.mark.parametrize("level", ["names", "none"])
def test_a_file_without_notes_is_smaller_and_read_alike_by_every_command(
    full: tuple[onnxq.Result, list[object]], level: str, tmp_path: Path
) -> None:
    out = tmp_path / "m.q.onnx"
    overrides = {"latency": False, "notes": level, "plan_out": tmp_path / "plan.json"}
    made = onnxq.quantize(residual(), images(), EVERYTHING, overrides=overrides, out=out)
    assert made.plan == full[0].plan
    assert made.report.output_bytes == out.stat().st_size < 0.8 * full[0].report.output_bytes
    # The plan lies beside it, and makes the same file again.
    again = onnxq.apply(residual(), tmp_path / "plan.json", overrides={"notes": level})
    assert again.model.SerializeToString() == out.read_bytes()
    # As text, since NaN equals itself in dataclasses only before Python 3.13.
    assert repr(read(made.model)) == repr(full[1])
    with pytest.raises(ModelError, match="already quantized"):
        quantize(made.model, images())


def test_the_attribute_bits_leaves_no_notes_either() -> None:
    model = quantize(residual(), images(), notes="none", bits_attribute=True).model
    bits = [{a.name: a.i for a in node.attribute}["bits"] for node in model.graph.node if "Linear" in node.op_type]
    assert set(bits) == {8, 32}
    assert not model.metadata_props
    assert not any(node.name or node.metadata_props for node in model.graph.node)


def test_variants_are_written_without_them(tmp_path: Path) -> None:
    config = tmp_path / "all.yaml"
    config.write_text("rules: [{op: '*', set: {quantize: true}}]\n")
    overrides = {"effort": "fast", "latency": False, "only": "int8", "notes": "names"}
    onnxq.variants(residual(), images(), config=config, overrides=overrides, out=tmp_path)
    made = onnx.load(tmp_path / "onnx" / "model_int8.onnx")
    assert [entry.key for entry in made.metadata_props] == ["onnxq.bits"]
    assert all(set(one) == {"bits"} for one in json.loads(made.metadata_props[0].value).values())
    assert all(node.name and not node.metadata_props for node in made.graph.node)


def test_the_summary_counts_an_exporters_notes_where_they_are_much_of_a_small_file(tmp_path: Path) -> None:
    proto = residual()
    for node in proto.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="File model.py, line 7, in forward\n" * 400)
    noted = onnxq.quantize(proto, images(), overrides={"latency": False}, out=tmp_path / "m.onnx").report
    assert noted.output_bytes < noted.source_bytes < 2 * noted.output_bytes
    assert noted.note_bytes > noted.output_bytes / 2
