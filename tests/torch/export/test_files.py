"""What an export writes: all files or none, the same file again, and the outputs of the module."""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest

torch = pytest.importorskip("torch")
from click.testing import CliRunner
from torch import Tensor

import onnxq
from onnxq.cli import cli
from onnxq.errors import ModelError, OutputError, PlanError
from onnxq.graph import fold_constants
from onnxq.sites import Role
from tests.interop.marked import renamed, reordered
from tests.torch.exporting import Depthwise, Encoder, Residual, assert_same, ort_run, quantized, wish
from tests.torch.nets import Network
from torch_frontend.export import ExportWarning, export_onnx, to_onnx
from torch_frontend.export.check import ExportCheck
from torch_frontend.export.run import write_all
from torch_frontend.quant_model import QuantModel, State


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantModel, Tensor, Path]:
    """A QuantModel exported to files, in a folder of its own."""
    folder = tmp_path_factory.mktemp("export")
    model, x = quantized(Encoder, wish(4, "channel"))
    done = export_onnx(model, folder / "net.onnx", x, dynamic_batch=True, input_names=["tokens"], output_names=["y"])
    assert set(done.files) == {folder / "net.onnx", folder / "net.float.onnx", folder / "net.plan.json"}
    return model, x, folder


def apply_plan(float_model: Path, folder: Path, again: Path) -> Path:
    command = ["apply", str(float_model), str(folder / "net.plan.json"), "-o", str(again)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    return again


def test_files_tell_of_modules_not_of_this_machine(written: tuple[QuantModel, Tensor, Path], tmp_path: Path) -> None:
    model, x, folder = written
    assert sorted(os.listdir(folder)) == ["net.float.onnx", "net.onnx", "net.plan.json"]
    bare, whole = onnx.load(folder / "net.float.onnx"), onnx.load(folder / "net.onnx")
    onnx.checker.check_model(bare, full_check=True)
    assert not {"QuantizeLinear", "DequantizeLinear", "FakeQuantize"} & {node.op_type for node in bare.graph.node}
    assert [value.name for value in (*whole.graph.input, *whole.graph.output)] == ["tokens", "y"]
    assert whole.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    with torch.no_grad():
        wanted = model(x[:2]).numpy()
    np.testing.assert_allclose(ort_run(whole, x[:2], [])["y"], wanted, rtol=1e-4, atol=1e-5)
    assert model.state is State.EXPORTED
    for name in ("net.onnx", "net.float.onnx"):
        data = (folder / name).read_bytes()
        for word in (str(Path(__file__).parent), "stack_trace", "site-packages", "exporting.py", "graph_signature"):
            assert word.encode() not in data, word
    assert {"qkv/MatMul", "norm1/LayerNormalization"} <= {node.name for node in bare.graph.node}
    kept = {tensor.name for tensor in bare.graph.initializer}
    assert {"qkv.weight", "up.weight"} <= kept
    assert not any("marked" in name for name in kept)
    assert {"norm1.out", "gelu.out"} <= {name for node in bare.graph.node for name in node.output}
    again = apply_plan(folder / "net.float.onnx", folder, tmp_path / "again.onnx")
    assert again.read_bytes() == (folder / "net.onnx").read_bytes()


@pytest.fixture(scope="module")
def exports(
    written: tuple[QuantModel, Tensor, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[type, tuple[Path, Tensor]]:
    """Export folders by network; the CNN as torch writes it without its own optimizer."""
    folder = tmp_path_factory.mktemp("cnn")
    model, x = quantized(Residual, wish(4, "channel", "ort"))
    export_onnx(model, folder / "net.onnx", x, optimize=False, dynamic_batch=True)
    return {Encoder: (written[2], written[1]), Residual: (folder, x)}


@pytest.mark.parametrize("change", [reordered, fold_constants, onnxslim.slim, renamed])
@pytest.mark.parametrize("net", [Encoder, Residual])
def test_the_plan_outlasts_what_tools_do_to_the_float_model(
    net: type, change: Any, exports: dict[type, Any], tmp_path: Path
) -> None:
    folder, x = exports[net]
    changed = tmp_path / "changed.onnx"
    onnx.save(change(onnx.load(folder / "net.float.onnx")), changed)
    again = apply_plan(changed, folder, tmp_path / "again.onnx")
    wanted, found = (ort_run(onnx.load(path), x, []) for path in (folder / "net.onnx", again))
    for a, b in zip(wanted.values(), found.values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_calibrated_is_enough_and_inputs_have_names() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 3, 8, 8)
    model = QuantModel(Depthwise().eval(), wish(), example_inputs=x)
    with pytest.raises(PlanError, match="the model is float"):
        to_onnx(model, x)
    model.prepare_calibration()
    with pytest.raises(PlanError, match="the model is observing"):
        to_onnx(model, x)
    model(x)
    exported = to_onnx(model.calc_qparams(), {"x": x}, dynamic_batch=True)
    assert_same(model, exported, x)
    assert_same(model, exported, x[:1])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_plan_fits_the_float_network_exported_by_torch_alone() -> None:
    torch.manual_seed(1)
    net = Depthwise().eval()
    model, x = quantized(Depthwise, wish(8, "channel"))
    exported = to_onnx(model, x)
    program = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    again = onnxq.apply(program.model_proto, exported.plan).model
    wanted = ort_run(exported.model, x, [])[exported.model.graph.output[0].name]
    np.testing.assert_array_equal(ort_run(again, x, [])[again.graph.output[0].name], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_that_no_engine_quantizes(dtype: torch.dtype) -> None:
    model, x = quantized(Depthwise, wish())
    with pytest.raises(ModelError, match=r"expand\.weight: is torch\.(bfloat16|float64).*\[Q121\]"):
        to_onnx(model.to(dtype), x.to(dtype))


def test_weights_alone() -> None:
    model, x = quantized(Depthwise, wish(4, "channel"))
    model.set_quant(activations=False)
    exported = to_onnx(model, x)
    assert {site.role for site in exported.plan.sites} == {Role.WEIGHT}
    assert_same(model, exported, x)


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    model, x = quantized(Depthwise, wish())
    (tmp_path / "net.plan.json").write_text("mine")
    with pytest.raises(OutputError, match=r"net\.plan\.json: exists"):
        export_onnx(model, tmp_path / "net.onnx", x)
    assert os.listdir(tmp_path) == ["net.plan.json"]
    assert model.state is State.FROZEN
    export_onnx(model, tmp_path / "net.onnx", x, force=True, float_path=tmp_path / "float.onnx")
    assert sorted(os.listdir(tmp_path)) == ["float.onnx", "net.onnx", "net.plan.json"]
    assert (tmp_path / "net.plan.json").read_text() != "mine"


def test_an_export_never_replaces_a_device() -> None:
    model = onnx.ModelProto()
    with pytest.raises(OutputError, match="is a pipe or device"):
        write_all({Path("/dev/null"): model}, {}, overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_weights_are_in_place_before_the_model_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = onnx.numpy_helper.from_array(np.ones(2000, np.float32), "w")
    y = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [2000])
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [y], [weight]))
    placed = []

    def replace(source: Path, target: Path, move: Any = os.replace) -> None:
        move(source, target)
        placed.append(Path(target))

    monkeypatch.setattr("onnxq.graph.save.ONE_MESSAGE", 0)
    monkeypatch.setattr("os.replace", replace)
    # A folder may list its files in any order.
    monkeypatch.setattr(Path, "iterdir", lambda folder: map(folder.joinpath, sorted(os.listdir(folder))))
    write_all({tmp_path / "net.onnx": model}, {}, overwrite=False)
    assert [path.name for path in placed if path.parent == tmp_path] == ["net.onnx_data", "net.onnx"]


def test_a_failure_leaves_no_file_and_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = quantized(Depthwise, wish())
    model.train()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_frontend.export.run.write_text", full)
    with pytest.raises(OutputError, match="No space left"):
        export_onnx(model, tmp_path / "net.onnx", x)
    assert os.listdir(tmp_path) == []
    assert model.training
    assert model.model.training
    assert not any("marked" in name for name, _ in model.named_buffers())


def double_in_export(network: Any, x: Tensor) -> Tensor:
    """Another network while it is exported."""
    y = network.inner(x)
    return 2 * y if torch.onnx.is_in_onnx_export() else y


def test_the_file_is_the_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = quantized(Depthwise, wish())
    with caplog.at_level(logging.INFO, "onnxq"):
        found = export_onnx(model, tmp_path / "net.onnx", x).check
    assert found.as_written > 100
    # Kernels of other CPUs round a value to the next step here and there.
    assert found.as_run > found.quantization > 20
    assert not found.beyond_rounding
    assert found.max_abs < 1e-2
    assert re.search(r"net\.onnx against torch: SQNR (\d+\.\d dB|exact) as written, ", caplog.text)
    assert export_onnx(model, tmp_path / "net.onnx", x, force=True, check=False).check is None


def test_the_line_says_how_near_the_file_is_in_decibels_as_other_reports_do() -> None:
    assert str(ExportCheck(math.inf, 41.26, 0.00123, 38.0)) == (
        "against torch: SQNR exact as written, 41.3 dB as ONNX Runtime optimizes it (at most 0.0012 apart); "
        "of quantization itself 38.0 dB"
    )
    assert str(ExportCheck(not_run="no session")) == "was not compared with torch: no session"
    # Levels that rounding crosses may come near the noise of quantization, not beyond it.
    assert not ExportCheck(50.0, 50.0, 0.1, 38.0).beyond_rounding
    assert ExportCheck(50.0, 34.0, 0.1, 38.0).beyond_rounding


def test_another_network_is_a_warning(tmp_path: Path) -> None:
    model, x = quantized(Depthwise, wish())
    doubled = Network(double_in_export, inner=model.model).eval()
    with pytest.warns(ExportWarning, match=r"net\.onnx against torch: SQNR .*: it does not .*\[W126\]"):
        found = export_onnx(doubled, tmp_path / "net.onnx", x, target="virtual").check
    assert found.beyond_rounding
