"""Files that the real tools made (tests/interop/real): each is read with its numbers, and nothing is lost unsaid."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.annotate import check_notes, find_existing, read_model
from onnxq.graph import name_nodes
from onnxq.interop import find_format, read_scales
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.interop.real.make import make_network, make_samples

REAL = Path(__file__).parent / "real"


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    return make_network()


@pytest.mark.parametrize(
    ("name", "kind", "entries", "skipped"),
    [
        ("aimet.0.6.1.encodings", "aimet-0.6.1", 8, 0),
        ("aimet.1.0.0.encodings", "aimet-1.0", 8, 0),
        ("aimet.2.0.0.encodings", "aimet-2.0", 13, 0),
        ("aimet.w4a16.2.0.0.encodings", "aimet-2.0", 13, 0),
        ("aimet.lpbq.1.0.0.encodings", "aimet-1.0", 7, 1),
        ("aimet.lpbq.2.0.0.encodings", "aimet-2.0", 13, 0),
        ("aimet_torch.2.1.0.encodings", "aimet-2.1", 12, 0),
        ("ppq.json", "ppq", 13, 4),
        ("ppq.ppl.json", "ppq", 9, 0),
        ("ppq.trt.json", "tensorrt-ranges", 9, 0),
        ("ort.overrides.json", "tensor-quant-overrides", 7, 0),
    ],
)
def test_every_entry_of_a_tool_is_read_or_named(name: str, kind: str, entries: int, skipped: int) -> None:
    table = read_scales(REAL / name)
    assert (table.kind, len(table.entries), len(table.skipped)) == (kind, entries, skipped)
    assert all(entry.reason for entry in table.skipped)
    # What is written of it says the same, or it is refused.
    row = find_format(kind)
    held = [entry for entry in table.entries if not row.refuse(entry)]
    if row.write is not None and held:
        again = {entry.name: entry for entry in row.parse(row.write(held), name).entries}
        assert all(np.array_equal(again[entry.name].scale, entry.scale) for entry in held)


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
@pytest.mark.parametrize(("kind", "widths"), [("", (8, 8)), ("w4a16.", (16, 4))])
def test_all_encodings_are_one_plan(net: onnx.ModelProto, version: str, kind: str, widths: tuple[int, int]) -> None:
    found = onnxq.import_calibration(REAL / f"aimet.{kind}{version}.encodings", net)
    root = json.loads((REAL / f"aimet.{kind}2.0.0.encodings").read_text())
    by_name = {row["name"]: row for row in root["encodings"]}
    assert found.plan.target == "qnn"
    assert not found.missing
    assert not [match for match in found.matched if match.kept]
    # What a pool and a Reshape make of r2 has its scale in all versions.
    assert {match.site for match in found.matched if match.through} <= {"p", "f"}
    for site in found.plan.sites:
        if site.role is not Role.BIAS:
            row = by_name[site.quantized_tensor.name]
            assert site.spec.bits == widths[site.role is Role.WEIGHT]
            np.testing.assert_array_equal(site.qparams.scale, np.float32(row["y_scale"]))
            np.testing.assert_array_equal(
                site.qparams.zero_point, np.int32(row.get("y_zero_point", 0)) + np.zeros_like(site.qparams.zero_point)
            )
    model = onnxq.apply(net, found.plan, overrides={"latency": False}).model
    answer = Session(model, optimize=False).run({"x": make_samples()[0]})["y"]
    exact = Session(net, optimize=False).run({"x": make_samples()[0]})["y"]
    # Weights of 4 bits by AIMET's own scales.
    assert np.abs(answer - exact).max() < (0.05 if not kind else 0.5)


def test_blocks_in_two_steps_are_their_product(net: onnx.ModelProto) -> None:
    root = json.loads((REAL / "aimet.lpbq.2.0.0.encodings").read_text())
    row = next(row for row in root["encodings"] if row["name"] == "w3")
    product = np.float32(np.array(row["per_block_int_scale"]) * np.array(row["per_channel_float_scale"]))
    plan = onnxq.import_calibration(
        REAL / "aimet.lpbq.2.0.0.encodings", net, config="virtual-int8", overrides={"bias": "float"}
    ).plan
    site = next(site for site in plan.sites if site.quantized_tensor.name == "w3")
    assert (site.spec.bits, site.spec.granularity.size) == (4, 8)
    np.testing.assert_array_equal(site.qparams.scale, product)


def test_blocks_in_a_table_are_their_product() -> None:
    file, net = REAL / "aimet_torch.2.1.0.encodings", REAL / "aimet_torch.onnx"
    row = next(row for row in json.loads(file.read_text())["encodings"] if row["name"] == "6.weight")
    product = np.float32(np.array(row["y_scale"]["x"]) * np.array(row["y_scale"]["x_scale"])[:, None])
    plan = onnxq.import_calibration(file, net, config="virtual-int8").plan
    site = next(site for site in plan.sites if site.quantized_tensor.name == "6.weight")
    assert (site.spec.bits, site.spec.granularity.size) == (4, 8)
    np.testing.assert_array_equal(site.qparams.scale, product)
    model = onnxq.apply(net, plan, overrides={"latency": False}).model
    answer = Session(model, optimize=False).run({"x": make_samples()[0]})["y"]
    # The tool's own network rounds its answer, too.
    step = next(row["y_scale"] for row in json.loads(file.read_text())["encodings"] if row["name"] == "y")
    assert np.abs(answer - np.load(REAL / "aimet_torch.answers.npy")).max() < step


@pytest.mark.parametrize(
    ("name", "config", "matched"),
    [
        ("ppq.json", "virtual-int8", 7),
        ("ppq.ppl.json", "virtual-int8", 5),
        ("ppq.trt.json", "trt-int8", 2),
        ("ort.overrides.json", "qnn-int8", 7),
    ],
)
def test_plans_of_other_tools_numbers(net: onnx.ModelProto, name: str, config: str, matched: int) -> None:
    found = onnxq.import_calibration(REAL / name, net, config=config, overrides={"allow_missing": True})
    assert len(found.matched) == matched
    assert not [match for match in found.matched if match.kept]
    scales = {entry.name: entry.scale for entry in read_scales(REAL / name).entries}
    by_site = {str(site.site): site for site in found.plan.sites}
    for match in found.matched:
        np.testing.assert_array_equal(by_site[match.site].qparams.scale, scales[match.name])


EXPORTS = ("nncf.onnx", "modelopt.onnx", "torchao.onnx", "ppq.qdq.onnx", "brevitas.qcdq.onnx", "brevitas.qonnx.onnx")


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_read_as_a_float_network_and_their_numbers(name: str) -> None:
    """Every pair of the file is one of the result, with the scale that the file has."""
    proto = name_nodes(read_model(REAL / name).proto)
    existing = find_existing(proto)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    scales = {node.name: values[node.input[1]] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    found = {site.dequantize: site for site in existing.sites}
    assert len(found) == len(scales)
    for node, site in found.items():
        np.testing.assert_array_equal(site.qparams.scale.reshape(-1), scales[node].reshape(-1))
    floats = onnxq.convert(REAL / name, "float").result.model
    assert not {node.op_type for node in floats.graph.node} & {"QuantizeLinear", "Quant"}
    # Its answers are those of the file but for the rounding of activations.
    assert np.abs(run(floats) - run(proto)).max() < 0.3
    exported = onnxq.export_calibration(REAL / name, "aimet-1.0")
    assert len(exported.written) == len({site.quantized_tensor for site in found.values()})
    assert exported.complete


@pytest.mark.parametrize(
    ("name", "integers"),
    [("nncf.onnx", 2), ("torchao.onnx", 2), ("ppq.qdq.onnx", 2), ("brevitas.qonnx.onnx", 2), ("brevitas.qcdq.onnx", 2)],
)
def test_exports_become_files_of_another_engine_with_their_integers(name: str, integers: int) -> None:
    done = onnxq.convert(REAL / name, "trt", overrides={"latency": False})
    assert sum(site.how.name == "INTEGERS" for site in done.sites) == integers
    assert done.answers.agreement > 20


def run(model: onnx.ModelProto) -> np.ndarray:
    (answer,) = Session(model, optimize=False).run({model.graph.input[0].name: make_samples()[0]}).values()
    return answer


@pytest.mark.parametrize(
    ("name", "answers", "ops"),
    [
        ("brevitas.qonnx.onnx", "brevitas.answers.npy", 0),
        ("brevitas.qcdq.onnx", "brevitas.answers.npy", 0),
        # Signs and a truncation are computed in float, in front of pairs of their levels.
        ("brevitas.binary.onnx", "brevitas.binary.answers.npy", 12),
    ],
)
def test_quant_nodes_answer_as_the_network_that_was_trained(name: str, answers: str, ops: int) -> None:
    model = read_model(REAL / name).proto
    assert {node.domain for node in model.graph.node} == {""}
    np.testing.assert_allclose(run(model), np.load(REAL / answers), atol=1e-6)
    assert sum("/result" in node.output[0] for node in model.graph.node) == ops


def test_bits_of_brevitas_in_both_of_its_forms() -> None:
    forms = [onnxq.inspect(REAL / name).pairs for name in ("brevitas.qonnx.onnx", "brevitas.qcdq.onnx")]
    for pairs in forms:
        assert [pair.bits for pair in pairs if pair.role is Role.WEIGHT] == [4, 4, 3]
        assert sorted(pair.bits for pair in pairs if pair.role is Role.ACTIVATION) == [4, 4, 8, 8]
    assert sorted(pair.bits for pair in onnxq.inspect(REAL / "brevitas.binary.onnx").pairs) == [2, 2, 4, 8]


def test_sparsebit_says_its_bits_by_an_attribute() -> None:
    """Its integers of weights go beyond the bits: the exporter rounds to bytes, and the check says so."""
    found = onnxq.inspect(REAL / "sparsebit.onnx")
    assert [(pair.bits, pair.origin.value) for pair in found.pairs] == [(4, "attribute")] * 6
    wrong = {line.site for line in check_notes(REAL / "sparsebit.onnx").disagreements if "4 bits" in line.why}
    assert wrong == {str(pair.site) for pair in found.pairs if pair.role is Role.WEIGHT}
    bounded = onnxq.annotate_bits(REAL / "sparsebit.onnx", emit="qcdq").model
    # But for these integers it is the network that was calibrated.
    assert np.abs(run(bounded) - np.load(REAL / "sparsebit.answers.npy")).max() < 0.02
    assert len(onnxq.export_calibration(REAL / "sparsebit.onnx", "aimet-2.0").written) == 6
    # ONNX Runtime, which loads no such file, answers what the converted one says.
    converted = onnxq.convert(REAL / "sparsebit.onnx", "ort", overrides={"kernels": False}).result.model
    assert not any(one.name == "bits" for node in converted.graph.node for one in node.attribute)
