"""Export by identity: every quantizer is found again, and other tools may rewrite the float model."""

from __future__ import annotations

import os
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
from onnxq.errors import ModelError, PlanError
from onnxq.graph import fold_constants
from onnxq.sites import Role
from tests.interop.marked import renamed, reordered
from tests.torch.exporting import (
    Depthwise,
    Encoder,
    Residual,
    assert_same,
    ort_run,
    quantized,
    wish,
)
from torch_frontend.export import export_onnx, to_onnx
from torch_frontend.quant_model import QuantModel, State


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantModel, Tensor, Path]:
    """A QuantModel exported to files, in a folder of its own."""
    folder = tmp_path_factory.mktemp("export")
    model, x = quantized(Encoder, wish(4, "channel"))
    done = export_onnx(model, folder / "net.onnx", x, dynamic_batch=True, input_names=["tokens"], output_names=["y"])
    assert set(done.files) == {folder / "net.onnx", folder / "net.float.onnx", folder / "net.plan.json"}
    return model, x, folder


def test_three_files_and_nothing_else(written: tuple[QuantModel, Tensor, Path]) -> None:
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


def test_no_file_tells_of_this_machine(written: tuple[QuantModel, Tensor, Path]) -> None:
    here = Path(__file__).parent
    for name in ("net.onnx", "net.float.onnx"):
        data = (written[2] / name).read_bytes()
        for word in (str(here), "stack_trace", "site-packages", "exporting.py", "graph_signature"):
            assert word.encode() not in data, word


def test_nodes_and_tensors_are_named_after_modules(written: tuple[QuantModel, Tensor, Path]) -> None:
    bare = onnx.load(written[2] / "net.float.onnx")
    assert {"qkv/MatMul", "norm1/LayerNormalization"} <= {node.name for node in bare.graph.node}
    kept = {tensor.name for tensor in bare.graph.initializer}
    assert {"qkv.weight", "up.weight"} <= kept
    assert not any("marked" in name for name in kept)
    assert {"norm1.out", "gelu.out"} <= {name for node in bare.graph.node for name in node.output}


def test_the_command_makes_the_same_file_again(written: tuple[QuantModel, Tensor, Path], tmp_path: Path) -> None:
    folder = written[2]
    again = tmp_path / "again.onnx"
    command = ["apply", str(folder / "net.float.onnx"), str(folder / "net.plan.json"), "-o", str(again)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert again.read_bytes() == (folder / "net.onnx").read_bytes()


@pytest.mark.parametrize("change", [reordered, fold_constants, onnxslim.slim, renamed])
@pytest.mark.parametrize("net", [Encoder, Residual])
def test_the_plan_outlasts_what_tools_do_to_the_float_model(
    net: type, change: Any, exports: dict[type, Any], tmp_path: Path
) -> None:
    folder, x = exports[net]
    changed = tmp_path / "changed.onnx"
    onnx.save(change(onnx.load(folder / "net.float.onnx")), changed)
    again = tmp_path / "again.onnx"
    command = ["apply", str(changed), str(folder / "net.plan.json"), "-o", str(again)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    wanted, found = (ort_run(onnx.load(path), x, []) for path in (folder / "net.onnx", again))
    for a, b in zip(wanted.values(), found.values(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def exports(
    written: tuple[QuantModel, Tensor, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[type, tuple[Path, Tensor]]:
    """Export folders by network; the CNN as torch writes it without its own optimizer."""
    folder = tmp_path_factory.mktemp("cnn")
    model, x = quantized(Residual, wish(4, "channel", "ort"))
    export_onnx(model, folder / "net.onnx", x, optimize=False, dynamic_batch=True)
    return {Encoder: (written[2], written[1]), Residual: (folder, x)}


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


def test_export_before_calibration() -> None:
    model = QuantModel(Depthwise(), wish(), example_inputs=torch.randn(3, 3, 8, 8))
    with pytest.raises(PlanError, match="the model is float"):
        to_onnx(model, torch.randn(3, 3, 8, 8))
    model.prepare_calibration()
    with pytest.raises(PlanError, match="the model is observing"):
        to_onnx(model, torch.randn(3, 3, 8, 8))


def test_calibrated_is_enough() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 3, 8, 8)
    model = QuantModel(Depthwise().eval(), wish(), example_inputs=x).prepare_calibration()
    model(x)
    model.calc_qparams()
    exported = to_onnx(model, x)
    assert_same(model, exported, x)


def test_inputs_by_name() -> None:
    model, x = quantized(Depthwise, wish())
    exported = to_onnx(model, {"x": x}, dynamic_batch=True)
    with torch.no_grad():
        wanted = model(x=x[:1]).numpy()
    found = ort_run(exported.model, x[:1], [])[exported.model.graph.output[0].name]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_that_no_engine_quantizes(dtype: torch.dtype) -> None:
    model, x = quantized(Depthwise, wish())
    with pytest.raises(ModelError, match=r"expand\.weight: is torch\.(bfloat16|float64)"):
        to_onnx(model.to(dtype), x.to(dtype))


def test_weights_alone() -> None:
    model, x = quantized(Depthwise, wish(4, "channel"))
    model.set_quant(activations=False)
    exported = to_onnx(model, x)
    assert {site.role for site in exported.plan.sites} == {Role.WEIGHT}
    assert_same(model, exported, x)
