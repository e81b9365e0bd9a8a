"""Networks of many kinds, and where the engine and the front end put pairs in them."""

import io
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from onnxq import graph
from onnxq.config import Config
from onnxq.graph import GraphIndex
from onnxq.plan import Plan
from onnxq.planner.build import state_placement
from onnxq.planner.sums import read_constant
from onnxq.runtime import Session
from onnxq.sites import Role, TensorId
from tests.passes.kit import rewrite_model
from tests.torch.exporting import Encoder
from tests.torch.nets import Dense, Mobile, ResNet
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import Quantizer


def make_convs() -> nn.Module:
    """Convolutions with batch norms and activations, a stem among them."""
    stem = nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()
    inner = nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU6()
    return nn.Sequential(*stem, *inner, nn.Conv2d(64, 64, 1))


class Transformer(nn.Module):
    """A block with layer norms in front and GELU, its attention fused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Shared(nn.Module):
    """One convolution called twice, one weight read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(functional.relu(self.conv(x))))
        x = functional.adaptive_avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        return self.b(functional.relu(self.a(x)))


class Functional(nn.Module):
    """Everything by function: the weights are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w0, self.w1 = nn.Parameter(torch.randn(32, 16, 3, 3) / 12), nn.Parameter(torch.randn(32, 32, 1, 1) / 6)
        self.w2, self.table = nn.Parameter(torch.randn(64, 32) / 6), nn.Parameter(torch.randn(64, 20) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(functional.conv2d(x, self.w0, padding=1))
        x = functional.leaky_relu(functional.conv2d(x, self.w1), 0.1)
        x = torch.clamp(functional.linear(x.mean((2, 3)), self.w2), 0.0, 4.0)
        return torch.matmul(x, self.table)


class SqueezeExcite(nn.Module):
    """A squeeze-excite block with hard-swish, and SiLU behind."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.deep = nn.Conv2d(24, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.squeeze, self.excite = nn.Conv2d(64, 16, 1), nn.Conv2d(16, 64, 1)
        self.project, self.last, self.act = nn.Conv2d(64, 24, 1), nn.Conv2d(24, 24, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.hardswish(self.deep(functional.hardswish(self.expand(x))))
        gate = functional.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1)))
        y = y * functional.hardsigmoid(self.excite(gate))
        return x + self.act(self.last(self.project(y)))


class Pooled(nn.Module):
    """Padding, pooling of both kinds, slices and two classifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.conv = nn.ZeroPad2d(1), nn.Conv2d(16, 64, 3)
        self.pool, self.mean, self.next = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Conv2d(64, 64, 3, padding=1)
        self.a, self.b = nn.Linear(64 * 9, 64), nn.Linear(64, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.conv(self.pad(x))))
        x = self.mean(functional.relu(self.next(x)))[:, :, 1:4, 1:4]
        return self.b(functional.relu(self.a(x.contiguous().view(x.shape[0], -1))))


class Decoder(nn.Module):
    """A small U-shape: a transposed convolution, nearest upsampling, a concat."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, 2, 1)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.join, self.last = nn.Conv2d(64, 32, 3, padding=1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = functional.relu(self.down(x))
        b = self.up(functional.relu(self.deep(a)))
        c = functional.relu(self.join(torch.cat([a, b], 1)))
        return self.last(functional.interpolate(c, scale_factor=2.0, mode="nearest"))


class Spectrogram(nn.Module):
    """A filter and a short-time Fourier transform as convolutions, then a logarithm, then layers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 16, 9, padding=4, bias=False)
        self.stft = nn.Conv1d(16, 130, 64, 16, bias=False)
        self.a, self.b = nn.Conv1d(65, 64, 3, padding=1), nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = self.stft(self.filter(x)).chunk(2, 1)
        x = torch.log(torch.clamp(real**2 + imaginary**2, min=1e-5))
        return self.b(functional.relu(self.a(x)))


class Branches(nn.Module):
    """A projection of cut weights, a product on the left, a sum with a parameter, a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.shift = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.tanh(self.a(x)) * torch.sigmoid(self.b(x)) + self.shift
        return self.c(gate) + torch.stack([x, 2.0 * x]).sum(0)


NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convs": (make_convs, (1, 3, 32, 32)),
    "residual": (partial(ResNet, 32), (1, 3, 32, 32)),
    "dense": (partial(Dense, 32), (1, 3, 16, 16)),
    "mobile": (partial(Mobile, 24), (1, 3, 28, 28)),
    "attention": (partial(Encoder, 64, 4), (1, 20, 64)),
    "transformer": (Transformer, (1, 20, 64)),
    "encoder": (partial(nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True), (1, 20, 64)),
    "shared": (Shared, (1, 32, 12, 12)),
    "functional": (Functional, (1, 16, 16, 16)),
    "squeeze_excite": (SqueezeExcite, (1, 24, 14, 14)),
    "pooled": (Pooled, (1, 16, 20, 20)),
    "decoder": (Decoder, (1, 16, 24, 24)),
    "spectrogram": (Spectrogram, (1, 1, 800)),
    "branches": (Branches, (1, 12, 32)),
}


class Zoo(nn.Module):
    """All of them beside each other, so that one export does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.nets = nn.ModuleDict({name: make() for name, (make, _) in NETS.items()})
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0.0, 0.2)
                module.running_var.uniform_(0.5, 1.5)

    def forward(
        self, convs: Tensor, residual: Tensor, dense: Tensor, mobile: Tensor, attention: Tensor, transformer: Tensor,
        encoder: Tensor, shared: Tensor, functional: Tensor, squeeze_excite: Tensor, pooled: Tensor, decoder: Tensor,
        spectrogram: Tensor, branches: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        given = (convs, residual, dense, mobile, attention, transformer, encoder, shared, functional, squeeze_excite,
                 pooled, decoder, spectrogram, branches)  # fmt: skip
        return [net(x) for net, x in zip(self.nets.values(), given, strict=True)]


# What a tensor holds, whatever its order of axes: size, mean, root of the mean square. Equal within the noise of sums.
Mark = tuple[int, float, float]


def mark(value: Any) -> Mark:
    found = np.asarray(value, np.float64)
    return found.size, float(found.mean()), float(np.sqrt((found**2).mean()))


@cache
def exported() -> tuple[Zoo, dict[str, Tensor], onnx.ModelProto]:
    """The zoo, its inputs, and its export."""
    zoo = Zoo().eval()
    generator = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(shape, generator=generator) for name, (_, shape) in NETS.items()}
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = io.BytesIO()
        torch.onnx.export(zoo, tuple(inputs.values()), buffer, input_names=list(inputs), dynamo=True, verbose=False)
    logging.disable(logging.NOTSET)
    return zoo, inputs, graph.name_nodes(onnx.load_from_string(buffer.getvalue()))


def engine_marks(config: Config) -> dict[str, set[tuple[Role, Mark]]]:
    """Net -> role and mark of every tensor that the engine's plan quantizes."""
    _, inputs, proto = exported()
    ready = rewrite_model(proto, target=config.target, skip=frozenset({"upsampling"}))
    plan = state_placement(graph.infer_shapes(ready.proto), config).default(attention=config.attention == "quantized")
    index = GraphIndex(ready.proto)
    values = _run(ready.proto, inputs, plan)
    owners = _owners(index)
    found: dict[str, set[tuple[Role, Mark]]] = {name: set() for name in NETS}
    for site in plan.sites:
        if site.role is Role.BIAS:
            continue
        if site.role is Role.WEIGHT:
            made = (Role.WEIGHT, mark(read_constant(index, site.site)))
            owner = owners[index.find_node((site.consumers or ())[0].node).outputs[0]]
        else:
            made, owner = (Role.ACTIVATION, mark(values[site.site.name])), owners[site.site.name]
        found[owner].add(made)
    return found


def _run(proto: onnx.ModelProto, inputs: Mapping[str, Tensor], plan: Plan) -> dict[str, Any]:
    out = onnx.ModelProto.FromString(proto.SerializeToString())
    names = {site.site.name for site in plan.sites if isinstance(site.site, TensorId) and site.role is not Role.WEIGHT}
    known = {value.name for value in (*proto.graph.output, *proto.graph.input)}
    out.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names - known))
    fed = {name: value.numpy() for name, value in inputs.items()}
    return {**fed, **Session(out, optimize=False).run(fed)}


def _owners(index: GraphIndex) -> dict[str, str]:
    """Tensor -> the net that it belongs to: the input that it is computed from."""
    owners = {name: name for name in NETS}
    for node in index.nodes:
        source = next((owners[name] for name in node.inputs if name in owners), None)
        owners.update({} if source is None else dict.fromkeys(node.outputs, source))
    return owners


class _Values(fx.Interpreter):
    """The float values that quantizers read."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, Tensor] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.module.get_submodule(target), Quantizer):
            self.found[target] = args[0].detach()
        return super().call_module(target, args, kwargs)


def front_end_marks(config: Config) -> tuple[QuantModel, dict[str, dict[tuple[Role, Mark], str]]]:
    """The quantized zoo; net -> role and mark of every tensor that it quantizes, with the site."""
    zoo, inputs, _ = exported()
    model = QuantModel(zoo, config, example_inputs=inputs)
    reader = _Values(model.model)
    with torch.no_grad():
        reader.run(*inputs.values())
    weights = model.weights()
    found: dict[str, dict[tuple[Role, Mark], str]] = {name: {} for name in NETS}
    for path, quantizer in model.model.named_modules():
        if not isinstance(quantizer, Quantizer):
            continue
        site, role = quantizer.site, quantizer.role
        value = weights[site].detach() if role is Role.WEIGHT else reader.found[path]
        owner = next(name for name in NETS if site in (f"input:{name}",) or site.startswith(f"nets.{name}."))
        found[owner][role, mark(value)] = site
    return model, found
