"""Every operator the front end knows: converted without changing a value, quantized where `virtual` has a place for
it, trainable, and never an error for an unknown one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.nn import functional

from onnxq.evaluation.accumulator import measure_error
from torch_frontend.quant_model import QuantModel

F: Any = functional
INPUT = "input:x"


class Of(nn.Module):
    """One call of a module or function, behind nothing and before nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.op = call if isinstance(call, nn.Module) else None
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return (self.op if self.op is not None else self.call)(x)


class Two(nn.Module):
    """A function of x and something computed from it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x, torch.exp(-x))


class Held(nn.Module):
    """A function of x and a parameter."""

    def __init__(self, call: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.held = nn.Parameter(torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).reshape(shape))
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.held)


IMAGE, ROWS, LINE, VOLUME = (2, 4, 8, 8), (2, 6, 16), (2, 4, 12), (2, 4, 6, 6, 6)
# name: (module, shape of the input, sites)
QUANTIZED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "Conv1d": (lambda: Of(nn.Conv1d(4, 6, 3)), LINE, (INPUT, "op.weight")),
    "Conv2d": (lambda: Of(nn.Conv2d(4, 6, 3, padding=1)), IMAGE, (INPUT, "op.weight")),
    "Conv2d depthwise": (lambda: Of(nn.Conv2d(4, 8, 3, groups=4)), IMAGE, (INPUT, "op.weight")),
    "Conv2d reflecting": (lambda: Of(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), IMAGE,
                          (INPUT, "op.weight")),
    "Conv3d": (lambda: Of(nn.Conv3d(4, 5, 3)), VOLUME, (INPUT, "op.weight")),
    "ConvTranspose1d": (lambda: Of(nn.ConvTranspose1d(4, 6, 3, stride=2)), LINE, (INPUT, "op.weight")),
    "ConvTranspose2d": (lambda: Of(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2)), IMAGE, (INPUT, "op.weight")),
    "ConvTranspose3d": (lambda: Of(nn.ConvTranspose3d(4, 3, 2)), VOLUME, (INPUT, "op.weight")),
    "Linear": (lambda: Of(nn.Linear(16, 5)), ROWS, (INPUT, "op.weight")),
    "Linear without bias": (lambda: Of(nn.Linear(16, 5, bias=False)), ROWS, (INPUT, "op.weight")),
    "F.linear": (lambda: Held(F.linear, 5, 16), ROWS, (INPUT, "held")),
    "F.conv2d": (lambda: Held(lambda x, w: F.conv2d(x, w, stride=2), 5, 4, 3, 3), IMAGE, (INPUT, "held")),
    "x @ parameter": (lambda: Held(lambda x, w: x @ w, 16, 5), ROWS, (INPUT, "held")),
    "bmm": (lambda: Two(lambda x, y: torch.bmm(x, y.transpose(1, 2))), ROWS, (INPUT, "transpose.out")),
    "x.matmul": (lambda: Two(lambda x, y: x.matmul(y.mT.contiguous())), ROWS, (INPUT, "contiguous.out")),
    "x @ y": (lambda: Two(lambda x, y: x @ y.transpose(-1, -2)), ROWS, (INPUT, "transpose.out")),
    "scaled_dot_product_attention": (lambda: Two(lambda x, y: F.scaled_dot_product_attention(x, y, x)), ROWS,
                                     (INPUT, "exp.out")),
    "x + y": (lambda: Two(lambda x, y: x + y), ROWS, (INPUT, "exp.out")),
    "torch.add": (lambda: Two(torch.add), ROWS, (INPUT, "exp.out")),
    "x - y": (lambda: Two(lambda x, y: x - y), ROWS, (INPUT, "exp.out")),
    "x * y": (lambda: Two(lambda x, y: x * y), ROWS, (INPUT, "exp.out")),
    "ReLU": (lambda: Of(nn.ReLU()), ROWS, (INPUT,)),
    "ReLU in place": (lambda: Of(nn.ReLU(inplace=True)), ROWS, (INPUT,)),
    "F.relu_": (lambda: Of(lambda x: F.relu_(x * 1.0)), ROWS, ("mul.out",)),
    "ReLU6": (lambda: Of(nn.ReLU6()), ROWS, (INPUT,)),
    "LeakyReLU": (lambda: Of(nn.LeakyReLU(0.1)), ROWS, (INPUT,)),
    "PReLU": (lambda: Of(nn.PReLU(6)), ROWS, (INPUT,)),
    "ELU": (lambda: Of(nn.ELU()), ROWS, (INPUT,)),
    "Sigmoid": (lambda: Of(nn.Sigmoid()), ROWS, (INPUT,)),
    "SiLU": (lambda: Of(nn.SiLU()), ROWS, (INPUT,)),
    "F.silu in place": (lambda: Of(lambda x: F.silu(x * 1.0, inplace=True)), ROWS, ("mul.out",)),
    "GELU": (lambda: Of(nn.GELU()), ROWS, (INPUT,)),
    "GELU by tanh": (lambda: Of(nn.GELU(approximate="tanh")), ROWS, (INPUT,)),
    "Mish": (lambda: Of(nn.Mish()), ROWS, (INPUT,)),
    "Hardsigmoid": (lambda: Of(nn.Hardsigmoid()), ROWS, (INPUT,)),
    "Hardswish": (lambda: Of(nn.Hardswish()), ROWS, (INPUT,)),
    "Hardtanh": (lambda: Of(nn.Hardtanh()), ROWS, (INPUT,)),
    "Tanh": (lambda: Of(nn.Tanh()), ROWS, (INPUT,)),
    "torch.tanh": (lambda: Of(torch.tanh), ROWS, (INPUT,)),
    "Softplus": (lambda: Of(nn.Softplus()), ROWS, (INPUT,)),
    "clamp": (lambda: Of(lambda x: x.clamp(-0.5, 0.5)), ROWS, (INPUT,)),
    "torch.clamp": (lambda: Of(lambda x: torch.clamp(x, min=0.0)), ROWS, (INPUT,)),
    "BatchNorm2d": (lambda: Of(nn.BatchNorm2d(4)), IMAGE, (INPUT,)),
    "GroupNorm": (lambda: Of(nn.GroupNorm(2, 4)), IMAGE, (INPUT,)),
    "InstanceNorm2d": (lambda: Of(nn.InstanceNorm2d(4)), IMAGE, (INPUT,)),
    "LayerNorm": (lambda: Of(nn.LayerNorm(16)), ROWS, (INPUT,)),
    "RMSNorm": (lambda: Of(nn.RMSNorm(16)), ROWS, (INPUT,)),
    "Softmax": (lambda: Of(nn.Softmax(-1)), ROWS, (INPUT,)),
    "x.softmax": (lambda: Of(lambda x: x.softmax(dim=-1)), ROWS, (INPUT,)),
    "AvgPool2d": (lambda: Of(nn.AvgPool2d(3, padding=1, count_include_pad=False)), IMAGE, (INPUT,)),
    "F.avg_pool2d": (lambda: Of(lambda x: F.avg_pool2d(x, 2)), IMAGE, (INPUT,)),
    "AdaptiveAvgPool2d": (lambda: Of(nn.AdaptiveAvgPool2d(1)), IMAGE, (INPUT,)),
    "x.mean over a list": (lambda: Of(lambda x: x.mean([2, 3])), IMAGE, (INPUT,)),
    "torch.mean": (lambda: Of(lambda x: torch.mean(x, dim=1, keepdim=True)), ROWS, (INPUT,)),
    "x.sum": (lambda: Of(lambda x: x.sum(-1)), ROWS, (INPUT,)),
    "interpolate bilinear": (lambda: Of(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear",
                                                                align_corners=False)), IMAGE, (INPUT,)),
    "interpolate bicubic": (lambda: Of(lambda x: F.interpolate(x, size=(5, 7), mode="bicubic")), IMAGE, (INPUT,)),
    "interpolate area": (lambda: Of(lambda x: F.interpolate(x, size=4, mode="area")), IMAGE, (INPUT,)),
    "interpolate linear": (lambda: Of(lambda x: F.interpolate(x, scale_factor=2.0, mode="linear")), LINE, (INPUT,)),
    "interpolate trilinear": (lambda: Of(nn.Upsample(scale_factor=2.0, mode="trilinear")), VOLUME, (INPUT,)),
    "Upsample to a size": (lambda: Of(nn.Upsample(size=(6, 6), mode="bilinear", align_corners=True)), IMAGE, (INPUT,)),
}  # fmt: skip

# What hands values on or stays float without anything to say: (module, shape of the input)
PASSED_ON: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "interpolate nearest": (lambda: Of(lambda x: F.interpolate(x, scale_factor=2.0)), IMAGE),
    "interpolate nearest-exact": (lambda: Of(nn.Upsample(scale_factor=2.0, mode="nearest-exact")), IMAGE),
    "MaxPool2d": (lambda: Of(nn.MaxPool2d(2, padding=1)), IMAGE),
    "F.max_pool1d": (lambda: Of(lambda x: F.max_pool1d(x, 3, 2)), LINE),
    "AdaptiveMaxPool2d": (lambda: Of(nn.AdaptiveMaxPool2d(2)), IMAGE),
    "cat": (lambda: Two(lambda x, y: torch.cat([x, y], dim=1)), ROWS),
    "cat by name": (lambda: Two(lambda x, y: torch.cat(tensors=(x, y), dim=1)), ROWS),
    "stack": (lambda: Two(lambda x, y: torch.stack([x, y])), ROWS),
    "chunk": (lambda: Of(lambda x: x.chunk(2, -1)[1]), ROWS),
    "split": (lambda: Of(lambda x: torch.split(x, [4, 12], dim=-1)), ROWS),
    "unbind": (lambda: Of(lambda x: x.unbind(1)[2]), ROWS),
    "pad": (lambda: Of(lambda x: F.pad(x, (1, 2), mode="reflect")), ROWS),
    "ZeroPad2d": (lambda: Of(nn.ZeroPad2d(1)), IMAGE),
    "flatten": (lambda: Of(lambda x: torch.flatten(x, start_dim=1)), IMAGE),
    "Flatten": (lambda: Of(nn.Flatten()), IMAGE),
    "view of its own shape": (lambda: Of(lambda x: x.view(x.shape[0], -1)), IMAGE),
    "reshape by size": (lambda: Of(lambda x: x.reshape(x.size(0) * x.shape[1], x.size(2), -1)), IMAGE),
    "permute of a tuple": (lambda: Of(lambda x: x.permute((0, 2, 1))), ROWS),
    "transpose": (lambda: Of(lambda x: x.transpose(1, 2).contiguous()), ROWS),
    "squeeze": (lambda: Of(lambda x: x.unsqueeze(1).squeeze(1)), ROWS),
    "slice": (lambda: Of(lambda x: x[:, ::2, 1:-1]), ROWS),
    "slice with ...": (lambda: Of(lambda x: x[..., None, 0]), ROWS),
    "expand": (lambda: Of(lambda x: x.unsqueeze(0).expand(3, -1, -1, -1)), ROWS),
    "expand_as": (lambda: Two(lambda x, y: x[:, :1].expand_as(y)), ROWS),
    "repeat": (lambda: Of(lambda x: x.repeat(1, 2, 1)), ROWS),
    "Dropout": (lambda: Of(nn.Dropout(0.5)), ROWS),
    "Identity": (lambda: Of(nn.Identity()), ROWS),
    "clone, detach": (lambda: Of(lambda x: x.clone().detach()), ROWS),
    "where": (lambda: Two(lambda x, y: torch.where(x > 0, x, y)), ROWS),
    "x.where": (lambda: Two(lambda x, y: x.where(x > 0, y)), ROWS),
    "masked_fill": (lambda: Of(lambda x: x.masked_fill(x > 1, 0.0)), ROWS),
    "floor division": (lambda: Of(lambda x: x // 2), ROWS),
    "equality": (lambda: Of(lambda x: (x == 0).float()), ROWS),
    "division by a number": (lambda: Of(lambda x: x / 3.0), ROWS),
    "PixelShuffle": (lambda: Of(nn.PixelShuffle(2)), IMAGE),
    "exp, log, sqrt, pow": (lambda: Of(lambda x: (x.exp().log() ** 2 + 1.0).sqrt()), ROWS),
    "argmax": (lambda: Of(lambda x: x.argmax(-1)), ROWS),
    "topk": (lambda: Of(lambda x: x.topk(3)[0]), ROWS),
    "max over a dim": (lambda: Of(lambda x: x.max(dim=-1).values), ROWS),
    "x plus a number": (lambda: Of(lambda x: 1.0 + x * 2), ROWS),
}  # fmt: skip


def inputs(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def converted(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, QuantModel, Tensor]:
    torch.manual_seed(0)
    model, x = make().eval(), inputs(shape)
    return model, QuantModel(model, target="virtual", example_inputs=x), x


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_operator_is_quantized_where_it_reads_and_learns(name: str) -> None:
    make, shape, sites = QUANTIZED[name]
    model, quantized, x = converted(make, shape)
    assert torch.equal(quantized(x), model(x))
    assert tuple(quantized.quantizers) == sites
    assert not quantized.refusals
    quantized.prepare_calibration()
    quantized(x)
    quantized.calc_qparams().set_quant()
    result = quantized(x)
    assert not torch.equal(result, model(x))
    assert measure_error(model(x).detach().numpy(), result.detach().numpy()).sqnr_db > 25
    given = x.clone().requires_grad_()
    quantized(given).square().sum().backward()
    assert given.grad is not None
    assert given.grad.abs().sum() > 0
    for site, weight in quantized.weights().items():
        assert weight.grad is not None, site
        assert weight.grad.abs().sum() > 0, site


@pytest.mark.parametrize("name", PASSED_ON)
def test_an_operator_that_hands_values_on_is_left_alone(name: str) -> None:
    make, shape = PASSED_ON[name]
    model, quantized, x = converted(make, shape)
    assert all(torch.equal(a, b) for a, b in zip(flat(quantized(x)), flat(model(x)), strict=True))
    assert not quantized.quantizers
    assert not quantized.refusals


def test_an_embedding_has_its_table_quantized_and_its_indices_not() -> None:
    model, ids = Of(nn.Embedding(10, 4, padding_idx=1)).eval(), torch.tensor([[1, 2, 9]])
    quantized = QuantModel(model, target="virtual", example_inputs=ids)
    assert tuple(quantized.quantizers) == ("op.weight",)
    assert torch.equal(quantized(ids), model(ids))


def test_an_embedding_that_writes_into_its_table_is_refused() -> None:
    quantized = QuantModel(Of(nn.Embedding(10, 4, max_norm=1.0)), target="virtual")
    assert [(r.subject, "writes into the table" in r.reason) for r in quantized.refusals] == [("op", True)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_float_and_say_so(kind: type[nn.Module]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = kind(16, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.rnn(x)
            return self.head(out[:, -1])

    model, x = Net().eval(), inputs(ROWS)
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert [r.subject for r in quantized.refusals] == ["rnn"]
    assert tuple(quantized.quantizers) == ("getitem.out", "head.weight")


def test_what_nothing_is_known_of_stays_float_and_says_so() -> None:
    quantized = QuantModel(Of(lambda x: torch.fft.rfft(x).abs()), target="virtual")
    assert [r.subject for r in quantized.refusals] == ["fft_rfft"]


def test_an_operand_of_itself_is_no_pair() -> None:
    assert not QuantModel(Of(lambda x: x + x), target="virtual").quantizers
