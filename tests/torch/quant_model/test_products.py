"""Every product that reads a parameter is quantized, or named with the reason why not."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.nn import functional

from tests.torch.nets import Network, calibrate
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel

# name: (one product of the input [2, 3, 4] and a parameter, shape of the parameter, whether it is quantized)
PRODUCTS = {
    "linear": (lambda m, x: functional.linear(x, m.weight, m.bias), (5, 4), True),
    "matmul": (lambda m, x: x @ m.weight, (4, 5), True),
    "mm": (lambda m, x: torch.mm(x.flatten(0, 1), m.weight), (4, 5), True),
    "addmm": (lambda m, x: torch.addmm(m.bias, x.view(-1, 4), m.weight), (4, 5), True),
    "addmm method": (lambda m, x: m.bias.addmm(x.view(-1, 4), m.weight), (4, 5), True),
    "einsum": (lambda m, x: torch.einsum("bsd,df->bsf", x, m.weight), (4, 5), True),
    "einsum of the transpose": (lambda m, x: torch.einsum("bsd,fd->bsf", x, m.weight), (5, 4), True),
    "einsum with the weight first": (lambda m, x: torch.einsum("fd,bsd->bsf", m.weight, x), (5, 4), True),
    "einsum of any rank": (lambda m, x: torch.einsum("...d,df->...f", x, m.weight), (4, 5), True),
    "conv": (lambda m, x: functional.conv1d(x, m.weight, m.bias), (5, 3, 2), True),
    "conv_transpose": (lambda m, x: functional.conv_transpose1d(x, m.weight, m.bias), (3, 5, 2), True),
    # A weight of its own for every sample has no quantized kernel.
    "bmm": (lambda m, x: torch.bmm(x, m.weight), (2, 4, 5), False),
    "baddbmm": (lambda m, x: torch.baddbmm(m.bias, x, m.weight), (2, 4, 5), False),
    "einsum of batches": (lambda m, x: torch.einsum("bsd,bdf->bsf", x, m.weight), (2, 4, 5), False),
    "einsum over two axes": (lambda m, x: torch.einsum("bsd,sdf->bf", x, m.weight), (3, 4, 5), False),
    "scaled addmm": (lambda m, x: torch.addmm(m.bias, x.view(-1, 4), m.weight, beta=0.5), (4, 5), False),
    "tensordot": (lambda m, x: torch.tensordot(x, m.weight, 1), (4, 5), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_parameter_is_quantized_or_refused_by_name(name: str) -> None:
    compute, shape, quantized = PRODUCTS[name]
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(5))
    net, x = Network(compute, weight=weight, bias=bias).eval(), torch.randn(2, 3, 4)
    model = QuantModel(net, target="virtual", example_inputs=x)
    torch.testing.assert_close(model(x), net(x))
    (product,) = model.products
    if quantized:
        assert product.reason is None
        assert product.weight == "weight" or name.startswith("einsum of the")
        assert product.weight in model.quantizers
    else:
        assert product.reason.subject == product.subject
        assert product.reason.reason


def branching(layer: nn.Module, then: Any = lambda _, x: x) -> Network:
    """A layer that a forward with control flow on values calls."""
    weight = nn.Parameter(torch.randn(4, 4))
    return Network(lambda m, x: then(m, m.layer(x if x.sum() > 0 else -x)), layer=layer, weight=weight).eval()


@pytest.mark.parametrize(
    ("config", "scales"), [("virtual-int8", 8), ("ort-int8", 8), ("ort-int4-weights", 24), ("ort-dynamic", 8)]
)
def test_a_layer_of_transformers_with_a_turned_weight_is_quantized_where_nothing_can_be_traced(config, scales):
    layers = pytest.importorskip("transformers.pytorch_utils", reason="transformers is not installed")
    torch.manual_seed(0)
    net, x = branching(layers.Conv1D(8, 96)), torch.rand(2, 3, 96)
    model = QuantModel(net, config, example_inputs=x)
    assert not model.traced
    assert torch.equal(model(x), net(x))
    (product,) = model.products
    assert (product.weight, product.reason) == ("layer.weight", None)
    calibrate(model, x).freeze()
    assert model.quantizers["layer.weight"].qparams().scale.size == scales
    with torch.no_grad():
        assert 0 < float((model(x) - net(x)).abs().max()) < 2
    if config == "ort-int8":
        exported = to_onnx(nn.Sequential(model.model.get_submodule("layer")), x, target="ort")
        assert "layer.weight" in exported.sites


def test_products_of_a_model_that_cannot_be_traced_are_listed():
    def then(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.einsum("bi,io->bo", x, m.weight)
        return torch.addmm(x, x @ m.weight, m.weight)

    model = QuantModel(branching(nn.Linear(4, 4), then), target="virtual", example_inputs=torch.ones(2, 4))
    wanted = [("layer", True), ("einsum", False), ("matmul", False), ("addmm", False)]
    assert [(one.subject, one.reason is None) for one in model.products] == wanted
    assert {"einsum", "addmm"} <= {one.subject for one in model.refusals}
