"""Every operator the front end knows: converted without changing a value, quantized where `virtual` has a place for
it, trainable, and never an error for an unknown one.
"""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.nn import functional

from onnxq.evaluation.accumulator import measure_error
from tests.torch.nets import Network, calibrate
from torch_frontend.quant_model import QuantModel

F: Any = functional
INPUT = "input:x"


def of(call: Callable[..., Any]) -> Network:
    """One call of a module or function, behind nothing and before nothing."""
    if isinstance(call, nn.Module):
        return Network(lambda m, x: m.op(x), op=call)
    return Network(lambda _, x: call(x))


def two(call: Callable[..., Any]) -> Network:
    """A function of x and something computed from it."""
    return Network(lambda _, x: call(x, torch.exp(-x)))


def held(call: Callable[..., Any], *shape: int) -> Network:
    """A function of x and a parameter."""
    value = torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).reshape(shape)
    return Network(lambda m, x: call(x, m.held), held=nn.Parameter(value))


IMAGE, ROWS, LINE, VOLUME = (2, 4, 8, 8), (2, 6, 16), (2, 4, 12), (2, 4, 6, 6, 6)
# name: (module, shape of the input, sites)
QUANTIZED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "Conv1d": (lambda: of(nn.Conv1d(4, 6, 3)), LINE, (INPUT, "op.weight")),
    "Conv2d": (lambda: of(nn.Conv2d(4, 6, 3, padding=1)), IMAGE, (INPUT, "op.weight")),
    "Conv2d depthwise": (lambda: of(nn.Conv2d(4, 8, 3, groups=4)), IMAGE, (INPUT, "op.weight")),
    "Conv2d reflecting": (lambda: of(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), IMAGE,
                          (INPUT, "op.weight")),
    "Conv3d": (lambda: of(nn.Conv3d(4, 5, 3)), VOLUME, (INPUT, "op.weight")),
    "ConvTranspose1d": (lambda: of(nn.ConvTranspose1d(4, 6, 3, stride=2)), LINE, (INPUT, "op.weight")),
    "ConvTranspose2d": (lambda: of(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2)), IMAGE, (INPUT, "op.weight")),
    "ConvTranspose3d": (lambda: of(nn.ConvTranspose3d(4, 3, 2)), VOLUME, (INPUT, "op.weight")),
    "Linear": (lambda: of(nn.Linear(16, 5)), ROWS, (INPUT, "op.weight")),
    "Linear without bias": (lambda: of(nn.Linear(16, 5, bias=False)), ROWS, (INPUT, "op.weight")),
    "F.linear": (lambda: held(F.linear, 5, 16), ROWS, (INPUT, "held")),
    "F.conv2d": (lambda: held(lambda x, w: F.conv2d(x, w, stride=2), 5, 4, 3, 3), IMAGE, (INPUT, "held")),
    "x @ parameter": (lambda: held(lambda x, w: x @ w, 16, 5), ROWS, (INPUT, "held")),
    "bmm": (lambda: two(lambda x, y: torch.bmm(x, y.transpose(1, 2))), ROWS, (INPUT, "transpose.out")),
    "x.matmul": (lambda: two(lambda x, y: x.matmul(y.mT.contiguous())), ROWS, (INPUT, "contiguous.out")),
    "x @ y": (lambda: two(lambda x, y: x @ y.transpose(-1, -2)), ROWS, (INPUT, "transpose.out")),
    "scaled_dot_product_attention": (lambda: two(lambda x, y: F.scaled_dot_product_attention(x, y, x)), ROWS,
                                     (INPUT, "exp.out")),
    "x + y": (lambda: two(lambda x, y: x + y), ROWS, (INPUT, "exp.out")),
    "torch.add": (lambda: two(torch.add), ROWS, (INPUT, "exp.out")),
    "x - y": (lambda: two(lambda x, y: x - y), ROWS, (INPUT, "exp.out")),
    "x * y": (lambda: two(lambda x, y: x * y), ROWS, (INPUT, "exp.out")),
    "ReLU": (lambda: of(nn.ReLU()), ROWS, (INPUT,)),
    "ReLU in place": (lambda: of(nn.ReLU(inplace=True)), ROWS, (INPUT,)),
    "F.relu_": (lambda: of(lambda x: F.relu_(x * 1.0)), ROWS, ("mul.out",)),
    "ReLU6": (lambda: of(nn.ReLU6()), ROWS, (INPUT,)),
    "LeakyReLU": (lambda: of(nn.LeakyReLU(0.1)), ROWS, (INPUT,)),
    "PReLU": (lambda: of(nn.PReLU(6)), ROWS, (INPUT,)),
    "ELU": (lambda: of(nn.ELU()), ROWS, (INPUT,)),
    "Sigmoid": (lambda: of(nn.Sigmoid()), ROWS, (INPUT,)),
    "SiLU": (lambda: of(nn.SiLU()), ROWS, (INPUT,)),
    "F.silu in place": (lambda: of(lambda x: F.silu(x * 1.0, inplace=True)), ROWS, ("mul.out",)),
    "GELU": (lambda: of(nn.GELU()), ROWS, (INPUT,)),
    "GELU by tanh": (lambda: of(nn.GELU(approximate="tanh")), ROWS, (INPUT,)),
    "Mish": (lambda: of(nn.Mish()), ROWS, (INPUT,)),
    "Hardsigmoid": (lambda: of(nn.Hardsigmoid()), ROWS, (INPUT,)),
    "Hardswish": (lambda: of(nn.Hardswish()), ROWS, (INPUT,)),
    "Hardtanh": (lambda: of(nn.Hardtanh()), ROWS, (INPUT,)),
    "Tanh": (lambda: of(nn.Tanh()), ROWS, (INPUT,)),
    "torch.tanh": (lambda: of(torch.tanh), ROWS, (INPUT,)),
    "Softplus": (lambda: of(nn.Softplus()), ROWS, (INPUT,)),
    "clamp": (lambda: of(lambda x: x.clamp(-0.5, 0.5)), ROWS, (INPUT,)),
    "torch.clamp": (lambda: of(lambda x: torch.clamp(x, min=0.0)), ROWS, (INPUT,)),
    "BatchNorm2d": (lambda: of(nn.BatchNorm2d(4)), IMAGE, (INPUT,)),
    "GroupNorm": (lambda: of(nn.GroupNorm(2, 4)), IMAGE, (INPUT,)),
    "InstanceNorm2d": (lambda: of(nn.InstanceNorm2d(4)), IMAGE, (INPUT,)),
    "LayerNorm": (lambda: of(nn.LayerNorm(16)), ROWS, (INPUT,)),
    "RMSNorm": (lambda: of(nn.RMSNorm(16)), ROWS, (INPUT,)),
    "Softmax": (lambda: of(nn.Softmax(-1)), ROWS, (INPUT,)),
    "x.softmax": (lambda: of(lambda x: x.softmax(dim=-1)), ROWS, (INPUT,)),
    "AvgPool2d": (lambda: of(nn.AvgPool2d(3, padding=1, count_include_pad=False)), IMAGE, (INPUT,)),
    "F.avg_pool2d": (lambda: of(lambda x: F.avg_pool2d(x, 2)), IMAGE, (INPUT,)),
    "AdaptiveAvgPool2d": (lambda: of(nn.AdaptiveAvgPool2d(1)), IMAGE, (INPUT,)),
    "x.mean over a list": (lambda: of(lambda x: x.mean([2, 3])), IMAGE, (INPUT,)),
    "torch.mean": (lambda: of(lambda x: torch.mean(x, dim=1, keepdim=True)), ROWS, (INPUT,)),
    "x.sum": (lambda: of(lambda x: x.sum(-1)), ROWS, (INPUT,)),
    "interpolate bilinear": (lambda: of(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear",
                                                                align_corners=False)), IMAGE, (INPUT,)),
    "interpolate bicubic": (lambda: of(lambda x: F.interpolate(x, size=(5, 7), mode="bicubic")), IMAGE, (INPUT,)),
    "interpolate area": (lambda: of(lambda x: F.interpolate(x, size=4, mode="area")), IMAGE, (INPUT,)),
    "interpolate linear": (lambda: of(lambda x: F.interpolate(x, scale_factor=2.0, mode="linear")), LINE, (INPUT,)),
    "interpolate trilinear": (lambda: of(nn.Upsample(scale_factor=2.0, mode="trilinear")), VOLUME, (INPUT,)),
    "Upsample to a size": (lambda: of(nn.Upsample(size=(6, 6), mode="bilinear", align_corners=True)), IMAGE, (INPUT,)),
}  # fmt: skip

# What hands values on or stays float without anything to say: (module, shape of the input)
PASSED_ON: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "interpolate nearest": (lambda: of(lambda x: F.interpolate(x, scale_factor=2.0)), IMAGE),
    "interpolate nearest-exact": (lambda: of(nn.Upsample(scale_factor=2.0, mode="nearest-exact")), IMAGE),
    "MaxPool2d": (lambda: of(nn.MaxPool2d(2, padding=1)), IMAGE),
    "F.max_pool1d": (lambda: of(lambda x: F.max_pool1d(x, 3, 2)), LINE),
    "AdaptiveMaxPool2d": (lambda: of(nn.AdaptiveMaxPool2d(2)), IMAGE),
    "cat": (lambda: two(lambda x, y: torch.cat([x, y], dim=1)), ROWS),
    "cat by name": (lambda: two(lambda x, y: torch.cat(tensors=(x, y), dim=1)), ROWS),
    "stack": (lambda: two(lambda x, y: torch.stack([x, y])), ROWS),
    "chunk": (lambda: of(lambda x: x.chunk(2, -1)[1]), ROWS),
    "split": (lambda: of(lambda x: torch.split(x, [4, 12], dim=-1)), ROWS),
    "unbind": (lambda: of(lambda x: x.unbind(1)[2]), ROWS),
    "pad": (lambda: of(lambda x: F.pad(x, (1, 2), mode="reflect")), ROWS),
    "ZeroPad2d": (lambda: of(nn.ZeroPad2d(1)), IMAGE),
    "flatten": (lambda: of(lambda x: torch.flatten(x, start_dim=1)), IMAGE),
    "Flatten": (lambda: of(nn.Flatten()), IMAGE),
    "view of its own shape": (lambda: of(lambda x: x.view(x.shape[0], -1)), IMAGE),
    "reshape by size": (lambda: of(lambda x: x.reshape(x.size(0) * x.shape[1], x.size(2), -1)), IMAGE),
    "permute of a tuple": (lambda: of(lambda x: x.permute((0, 2, 1))), ROWS),
    "transpose": (lambda: of(lambda x: x.transpose(1, 2).contiguous()), ROWS),
    "squeeze": (lambda: of(lambda x: x.unsqueeze(1).squeeze(1)), ROWS),
    "slice": (lambda: of(lambda x: x[:, ::2, 1:-1]), ROWS),
    "slice with ...": (lambda: of(lambda x: x[..., None, 0]), ROWS),
    "expand": (lambda: of(lambda x: x.unsqueeze(0).expand(3, -1, -1, -1)), ROWS),
    "expand_as": (lambda: two(lambda x, y: x[:, :1].expand_as(y)), ROWS),
    "repeat": (lambda: of(lambda x: x.repeat(1, 2, 1)), ROWS),
    "Dropout": (lambda: of(nn.Dropout(0.5)), ROWS),
    "Identity": (lambda: of(nn.Identity()), ROWS),
    "clone, detach": (lambda: of(lambda x: x.clone().detach()), ROWS),
    "where": (lambda: two(lambda x, y: torch.where(x > 0, x, y)), ROWS),
    "x.where": (lambda: two(lambda x, y: x.where(x > 0, y)), ROWS),
    "masked_fill": (lambda: of(lambda x: x.masked_fill(x > 1, 0.0)), ROWS),
    "floor division": (lambda: of(lambda x: x // 2), ROWS),
    "equality": (lambda: of(lambda x: (x == 0).float()), ROWS),
    "division by a number": (lambda: of(lambda x: x / 3.0), ROWS),
    "PixelShuffle": (lambda: of(nn.PixelShuffle(2)), IMAGE),
    "exp, log, sqrt, pow": (lambda: of(lambda x: (x.exp().log() ** 2 + 1.0).sqrt()), ROWS),
    "argmax": (lambda: of(lambda x: x.argmax(-1)), ROWS),
    "topk": (lambda: of(lambda x: x.topk(3)[0]), ROWS),
    "max over a dim": (lambda: of(lambda x: x.max(dim=-1).values), ROWS),
    "x plus a number": (lambda: of(lambda x: 1.0 + x * 2), ROWS),
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
    calibrate(quantized, x).set_quant()
    result = quantized(x)
    assert not torch.equal(result, model(x))
    assert measure_error(model(x).detach().numpy(), result.detach().numpy()).sqnr_db > 25
    given = x.clone().requires_grad_()
    quantized(given).square().sum().backward()
    assert given.grad.abs().sum() > 0
    for site, weight in quantized.weights().items():
        assert weight.grad.abs().sum() > 0, site


@pytest.mark.parametrize("name", PASSED_ON)
def test_an_operator_that_hands_values_on_is_left_alone(name: str) -> None:
    make, shape = PASSED_ON[name]
    model, quantized, x = converted(make, shape)
    assert all(torch.equal(a, b) for a, b in zip(flat(quantized(x)), flat(model(x)), strict=True))
    assert not quantized.quantizers
    assert not quantized.refusals


def test_an_embedding_has_its_table_quantized_and_its_indices_not() -> None:
    model, ids = of(nn.Embedding(10, 4, padding_idx=1)).eval(), torch.tensor([[1, 2, 9]])
    quantized = QuantModel(model, target="virtual", example_inputs=ids)
    assert tuple(quantized.quantizers) == ("op.weight",)
    assert torch.equal(quantized(ids), model(ids))


def test_an_embedding_that_writes_into_its_table_is_refused() -> None:
    quantized = QuantModel(of(nn.Embedding(10, 4, max_norm=1.0)), target="virtual")
    assert [(r.subject, "writes into the table" in r.reason) for r in quantized.refusals] == [("op", True)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_float_and_say_so(kind: type[nn.Module]) -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        out, _ = m.rnn(x)
        return m.head(out[:, -1])

    model = Network(compute, rnn=kind(16, 8, batch_first=True), head=nn.Linear(8, 3)).eval()
    x = inputs(ROWS)
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert [r.subject for r in quantized.refusals] == ["rnn"]
    assert tuple(quantized.quantizers) == ("getitem.out", "head.weight")


def test_what_nothing_is_known_of_stays_float_and_says_so() -> None:
    quantized = QuantModel(of(lambda x: torch.fft.rfft(x).abs()), target="virtual")
    assert [(r.subject, r.code) for r in quantized.refusals] == [("fft_rfft", "R109")]


def test_an_operand_of_itself_is_no_pair() -> None:
    assert not QuantModel(of(lambda x: x + x), target="virtual").quantizers
