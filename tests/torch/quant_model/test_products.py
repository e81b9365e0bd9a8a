"""Every product that reads a parameter is quantized, or named with the reason why not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.nn import functional

from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel


class Product(nn.Module):
    """One product of the input [2, 3, 4] and a parameter."""

    def __init__(self, compute, *shape: int) -> None:
        super().__init__()
        self.weight, self.bias, self.compute = nn.Parameter(torch.randn(*shape)), nn.Parameter(torch.randn(5)), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


QUANTIZED = {
    "linear": (lambda m, x: functional.linear(x, m.weight, m.bias), (5, 4)),
    "matmul": (lambda m, x: x @ m.weight, (4, 5)),
    "mm": (lambda m, x: torch.mm(x.flatten(0, 1), m.weight), (4, 5)),
    "addmm": (lambda m, x: torch.addmm(m.bias, x.view(-1, 4), m.weight), (4, 5)),
    "addmm method": (lambda m, x: m.bias.addmm(x.view(-1, 4), m.weight), (4, 5)),
    "einsum": (lambda m, x: torch.einsum("bsd,df->bsf", x, m.weight), (4, 5)),
    "einsum of the transpose": (lambda m, x: torch.einsum("bsd,fd->bsf", x, m.weight), (5, 4)),
    "einsum with the weight first": (lambda m, x: torch.einsum("fd,bsd->bsf", m.weight, x), (5, 4)),
    "einsum of any rank": (lambda m, x: torch.einsum("...d,df->...f", x, m.weight), (4, 5)),
    "conv": (lambda m, x: functional.conv1d(x, m.weight, m.bias), (5, 3, 2)),
    "conv_transpose": (lambda m, x: functional.conv_transpose1d(x, m.weight, m.bias), (3, 5, 2)),
}
REFUSED = {
    # A weight of its own for every sample has no quantized kernel.
    "bmm": (lambda m, x: torch.bmm(x, m.weight), (2, 4, 5)),
    "baddbmm": (lambda m, x: torch.baddbmm(m.bias, x, m.weight), (2, 4, 5)),
    "einsum of batches": (lambda m, x: torch.einsum("bsd,bdf->bsf", x, m.weight), (2, 4, 5)),
    "einsum over two axes": (lambda m, x: torch.einsum("bsd,sdf->bf", x, m.weight), (3, 4, 5)),
    "scaled addmm": (lambda m, x: torch.addmm(m.bias, x.view(-1, 4), m.weight, beta=0.5), (4, 5)),
    "tensordot": (lambda m, x: torch.tensordot(x, m.weight, 1), (4, 5)),
}


def prepare(compute, shape: tuple[int, ...]) -> tuple[QuantModel, Tensor]:
    torch.manual_seed(0)
    net, x = Product(compute, *shape).eval(), torch.randn(2, 3, 4)
    model = QuantModel(net, target="virtual", example_inputs=x)
    torch.testing.assert_close(model(x), net(x))
    return model, x


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_product_with_a_parameter_is_quantized(name):
    model, _ = prepare(*QUANTIZED[name])
    (product,) = model.products
    assert product.reason is None
    assert product.weight == "weight" or name.startswith("einsum of the")
    assert any(site == product.weight for site in model.quantizers)


@pytest.mark.parametrize("name", REFUSED)
def test_another_product_is_refused_by_name(name):
    model, _ = prepare(*REFUSED[name])
    (product,) = model.products
    assert product.reason is not None
    assert product.reason.subject == product.subject
    assert not model.quantizers or product.reason.reason


def make_stand_in() -> type[nn.Module]:
    """A class of the name and form of transformers' Conv1D."""

    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf = nf
            self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

        def forward(self, x: Tensor) -> Tensor:
            made = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
            return made.view((*x.size()[:-1], self.nf))

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    return Conv1D


def find_real() -> type[nn.Module]:
    return pytest.importorskip("transformers.pytorch_utils", reason="transformers is not installed").Conv1D


@pytest.mark.parametrize("find", [make_stand_in, find_real], ids=["stand-in", "transformers"])
@pytest.mark.parametrize(
    ("config", "scales"), [("virtual-int8", 8), ("ort-int8", 8), ("ort-int4-weights", 24), ("ort-dynamic", 8)]
)
def test_a_layer_of_transformers_with_a_turned_weight_is_quantized_where_nothing_can_be_traced(find, config, scales):
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = find()(8, 96)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    torch.manual_seed(0)
    net, x = Branching().eval(), torch.rand(2, 3, 96)
    model = QuantModel(net, config, example_inputs=x)
    assert not model.traced
    assert torch.equal(model(x), net(x))
    (product,) = model.products
    assert (product.weight, product.reason) == ("layer.weight", None)
    model.prepare_calibration()
    model(x)
    model.calc_qparams().freeze()
    assert model.quantizers["layer.weight"].qparams().scale.size == scales
    with torch.no_grad():
        assert 0 < float((model(x) - net(x)).abs().max()) < 2
    if config == "ort-int8":
        exported = to_onnx(Straight(model.model.get_submodule("layer")), x, target="ort")
        assert "layer.weight" in exported.sites


class Straight(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_products_of_a_model_that_cannot_be_traced_are_listed():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.einsum("bi,io->bo", self.layer(x if x.sum() > 0 else -x), self.weight)
            return torch.addmm(x, x @ self.weight, self.weight)

    model = QuantModel(Branching().eval(), target="virtual", example_inputs=torch.ones(2, 4))
    assert [(one.subject, one.reason is None) for one in model.products] == [
        ("layer", True),
        ("einsum", False),
        ("matmul", False),
        ("addmm", False),
    ]
    assert {"einsum", "addmm"} <= {one.subject for one in model.refusals}
