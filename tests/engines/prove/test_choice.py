"""`prove` takes its engine from the plan in the file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

import onnxq
from onnxq.engines.prove import prove
from tests.cli.kit import read, run
from tests.networks import parse_text
from tests.pipeline.models import images, residual

pytestmark = pytest.mark.usefixtures("engines_here")
ORT, RTX = "ort", "tensorrt-rtx"


def choose_engine(proto: onnx.ModelProto, capability: str | None) -> tuple[str, str]:
    engine, reason = prove.choose_engine(proto, capability)
    return engine.name, reason


@pytest.fixture(scope="module")
def quantized() -> dict[str, onnx.ModelProto]:
    """A model quantized for each target, at the least effort."""
    configs = {name: onnxq.load_config(f"{name}-int8", {"effort": "fast"}) for name in ("ort", "trt", "virtual")}
    return {
        name: onnxq.quantize(residual(), images(4), config, overrides={"latency": False}).model
        for name, config in configs.items()
    }


def test_the_plan_in_the_file_says_which_engine(quantized: dict[str, onnx.ModelProto]) -> None:
    assert choose_engine(quantized["ort"], None) == (ORT, "the plan in the file is for ort")
    assert choose_engine(quantized["trt"], None) == (RTX, "the plan in the file is for trt")
    assert choose_engine(quantized["virtual"], None) == (RTX, "the default: the plan in the file is for virtual")
    assert choose_engine(residual(), None) == (RTX, "the default: the file holds no plan")
    assert choose_engine(quantized["ort"], "8.9") == (RTX, "a compute capability was given")
    # A plan that cannot be read is none.
    broken = onnx.ModelProto.FromString(quantized["trt"].SerializeToString())
    for entry in broken.metadata_props:
        entry.value = "{"
    assert choose_engine(broken, None) == (RTX, "the default: the file holds no plan")


@pytest.mark.parametrize("wanted", [QuantType.QInt8, QuantType.QUInt8])
def test_operators_on_integers_without_a_plan_are_proved_where_they_run(tmp_path: Path, wanted: QuantType) -> None:
    onnx.save(residual(), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "m.onnx", weight_type=wanted)
    model = onnx.load(tmp_path / "m.onnx")
    assert "DynamicQuantizeLinear" in [node.op_type for node in model.graph.node]
    assert choose_engine(model, None) == (ORT, "no plan, but uint8, 16 bits or operators on integers")
    assert choose_engine(model, "8.9") == (RTX, "a compute capability was given")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_zero_points_that_tensorrt_does_not_read_are_proved_where_they_run(bits: int, *, signed: bool) -> None:
    """As onnxruntime.quantization writes pairs by default, and for NPUs."""
    body = "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)"
    zero = np.zeros((), f"{'i' if signed else 'u'}{bits // 8}")
    proto = parse_text(f"g (float[4] x) => (float[4] y) {{ {body} }}", s=np.float32(1), z=zero)
    assert choose_engine(proto, None)[0] == (RTX if signed and bits == 8 else ORT)


def test_prove_goes_by_it_and_says_so(quantized: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    onnx.save(quantized["ort"], tmp_path / "m.onnx")
    done = run("prove", tmp_path / "m.onnx", "--require-int8", "Conv")
    assert done.exit_code == 0, done.output
    assert "ort: the plan in the file is for ort" in " ".join(done.output.split())
    told = read("prove", tmp_path / "m.onnx")
    assert told["build"]["engine"] == ORT
    assert told["chosen"] == "the plan in the file is for ort"


def test_an_engine_that_is_named_is_taken(quantized: dict[str, onnx.ModelProto]) -> None:
    proof = onnxq.prove(quantized["trt"], overrides={"engine": "ort"})
    assert proof.build.engine == ORT
    assert proof.chosen == ""
    # What only ONNX Runtime has needs no --engine where the plan says it.
    assert onnxq.prove(quantized["ort"], overrides={"require_exact": True}).build.engine == ORT
