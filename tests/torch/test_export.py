"""Export by identity: what is written, what is checked, and what other tools may do to the float model."""

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
from torch import Tensor, nn
from torch.nn import functional

import onnxq
from onnxq.cli import cli
from onnxq.errors import CalibrationError, ModelError, OutputError, PlanError
from onnxq.graph import fold_constants
from onnxq.sites import Role, TensorId
from onnxq.spec import PerChannel, QuantSpec
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
from torch_frontend.export.files import write_all
from torch_frontend.quant_model import QuantModel, State
from torch_frontend.quantizers import Quantizer, Uniform, quantizers_of
from torch_frontend.quantizers.marker import mark

ACT = QuantSpec(bits=8, signed=False, symmetric=False)


def uniform(site: str, lo: Any = -2.0, hi: Any = 2.0, spec: QuantSpec = ACT, role: Role = Role.ACTIVATION) -> Uniform:
    made = Uniform(spec, site=site, role=role)
    made.calc_qparams_with_minmax(lo, hi)
    return made


def weighted(site: str, weight: Tensor, bits: int = 8, axis: int = 0) -> Uniform:
    rows = weight.detach().movedim(axis, 0).flatten(1)
    spec = QuantSpec(bits=bits, granularity=PerChannel(axis))
    return uniform(site, rows.amin(1), rows.amax(1), spec, Role.WEIGHT)


class ByHand(nn.Module):
    """Quantizers set by hand in a model that torch.fx cannot trace, with most of what makes identity hard.

    A layer called twice, a weight read by two layers, an add of one tensor to itself, two quantizers on one tensor,
    quantized inputs and outputs, and a branch on a shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.table = nn.Parameter(torch.randn(6, 3))
        self.wq = weighted("conv.weight", self.conv.weight)
        self.tied_rows, self.tied_whole = (
            weighted("table.rows", self.table),
            weighted("table.columns", self.table, axis=1),
        )
        self.x, self.inner = uniform("input:x"), uniform("conv.in", -4, 4)
        self.left, self.right, self.sum = (
            uniform("add.left", -3, 3),
            uniform("add.right", -5, 5),
            uniform("add.out", -8, 8),
        )
        self.y = uniform("output:y", -9, 9)
        self.unused = uniform("unused")
        self.unused.disabled_reason = "for the test"

    def step(self, x: Tensor) -> Tensor:
        return functional.conv2d(self.inner(x), self.wq(self.conv.weight), self.conv.bias, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        x = self.step(functional.relu(self.step(x)))
        if x.shape[-1] > 2:
            x = self.sum(self.left(x) + self.right(x))
        rows = self.tied_rows(self.table)[torch.tensor([1, 4, 5])]
        return self.y(functional.linear(x.mean((2, 3)) @ rows, self.tied_whole(self.table)))


@pytest.fixture(scope="module")
def by_hand() -> tuple[ByHand, Tensor]:
    torch.manual_seed(3)
    return ByHand().eval(), 1.5 * torch.randn(2, 3, 6, 6)


@pytest.mark.parametrize("optimize", [True, False])
def test_identity_is_found_however_torch_writes_the_graph(by_hand: tuple[ByHand, Tensor], optimize: bool) -> None:
    model, x = by_hand
    exported = to_onnx(model, x, target="virtual", optimize=optimize)
    assert "unused" not in exported.sites
    assert len(exported.sites["conv.in"]) == 2
    assert exported.sites["input:x"] == (TensorId("x"),)
    groups = [site.group for site in exported.plan.sites if "conv.in" in site.reason]
    assert groups == ["conv.in", "conv.in"]
    out = next(site for site in exported.plan.sites if site.reason == "quantizer output:y")
    assert out.role is Role.OUTPUT
    assert_same(model, exported, x)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_plain_torch_export_leaves_the_markers_too(by_hand: tuple[ByHand, Tensor]) -> None:
    model, x = by_hand
    first = to_onnx(model, x, target="virtual")
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    marked = onnxq.strip_markers(program.model_proto, target="virtual")
    assert set(marked.sites) == set(first.sites)
    again = onnxq.apply(marked.model, marked.plan).model
    name = first.model.graph.output[0].name
    np.testing.assert_array_equal(ort_run(again, x, [])[again.graph.output[0].name], ort_run(first.model, x, [])[name])


# -- files ---------------------------------------------------------------------------------------------------------


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


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    model, x = quantized(Depthwise, wish())
    (tmp_path / "net.plan.json").write_text("mine")
    with pytest.raises(OutputError, match=r"net\.plan\.json: exists"):
        export_onnx(model, tmp_path / "net.onnx", x)
    assert os.listdir(tmp_path) == ["net.plan.json"]
    assert model.state is State.FROZEN
    export_onnx(model, tmp_path / "net.onnx", x, overwrite=True, float_path=tmp_path / "float.onnx")
    assert sorted(os.listdir(tmp_path)) == ["float.onnx", "net.onnx", "net.plan.json"]
    assert (tmp_path / "net.plan.json").read_text() != "mine"


def test_an_export_never_replaces_a_device() -> None:
    model = onnx.ModelProto()
    with pytest.raises(OutputError, match="is a pipe or device"):
        write_all({Path("/dev/null"): model}, {}, overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_a_failure_leaves_no_file_and_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_frontend.export import files

    model, x = quantized(Depthwise, wish())
    model.train()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_text", full)
    with pytest.raises(OutputError, match="No space left"):
        export_onnx(model, tmp_path / "net.onnx", x)
    assert os.listdir(tmp_path) == []
    assert model.training
    assert model.model.training
    assert not any("marked" in name for name, _ in model.named_buffers())


# -- what cannot be exported ---------------------------------------------------------------------------------------


def test_export_before_calibration() -> None:
    model = QuantModel(Depthwise(), wish(), example_inputs=torch.randn(3, 3, 8, 8))
    with pytest.raises(PlanError, match="the model is float"):
        to_onnx(model, torch.randn(3, 3, 8, 8))
    model.prepare_calibration()
    with pytest.raises(PlanError, match="the model is observing"):
        to_onnx(model, torch.randn(3, 3, 8, 8))


def test_an_uncalibrated_quantizer_by_hand() -> None:
    net = nn.Sequential(Uniform(ACT, site="input:x"), nn.ReLU())
    with pytest.raises(CalibrationError, match="input:x: has no scale"):
        to_onnx(net, torch.randn(2, 3))


def test_quantizers_that_are_all_off() -> None:
    model, x = quantized(Depthwise, wish())
    model.set_quant(False, False)
    with pytest.raises(PlanError, match="none of its quantizers is switched on"):
        to_onnx(model, x)


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


class Lost(nn.Module):
    """Two of its quantizers take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.never, self.idle = uniform("input:x"), uniform("never.out"), uniform("idle.out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        self.idle(x + 1)
        return torch.relu(x)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_quantizer_that_the_graph_lost_is_named(optimize: bool) -> None:
    with pytest.raises(ModelError, match=r"never\.out: quantizes nothing .* holds for idle\.out"):
        to_onnx(Lost(), torch.randn(2, 3), optimize=optimize)


def test_two_quantizers_with_one_site() -> None:
    net = nn.Sequential(uniform("same"), nn.ReLU(), uniform("same"))
    with pytest.raises(ModelError, match="same: two quantizers have this site"):
        to_onnx(net, torch.randn(2, 3))


class Doubling(Uniform):
    """A user's quantizer that leaves a second marker, with a site nobody knows."""

    def marked(self, x: Tensor) -> Tensor:
        return mark(super().marked(x), *self._numbers(), self.spec, site="somewhere", role=self.role)


def test_a_marker_whose_site_is_unknown() -> None:
    strange = Doubling(ACT, site="input:x")
    strange.calc_qparams_with_minmax(-1, 1)
    with pytest.raises(ModelError, match="somewhere: is marked in the graph, and the model has no such quantizer"):
        to_onnx(nn.Sequential(strange, nn.ReLU()), torch.randn(2, 3))


class Flowing(nn.Module):
    """Control flow on values, which torch.export refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.x = uniform("input:x")

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        return x if x.sum() > 0 else -x


def test_what_torch_cannot_export_is_said_in_its_words() -> None:
    model = Flowing()
    with pytest.raises(ModelError, match=r"Flowing: torch\.onnx\.export failed"):
        to_onnx(model, torch.randn(2, 3))
    assert all(isinstance(q, Quantizer) and "marked_scale" not in q._buffers for q in quantizers_of(model))
