"""Small networks to quantize and export, and the comparison of torch's outputs with ONNX Runtime's."""

from collections import defaultdict
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from onnxq.plan.names import name_part
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.torch.nets import calibrate
from torch_frontend.export import Exported
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import quantizers_of


class Residual(nn.Module):
    """Convolutions with batch norms, a ReLU used three times, a functional add, a concat, pooling, a classifier."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu(self.stem(x))
        b = self.relu(self.norm(self.conv(a)) + a)
        c = torch.cat([a, functional.max_pool2d(b, 3, stride=1, padding=1)], 1)
        return self.fc(self.relu(c).mean((2, 3)))


class Depthwise(nn.Module):
    """An inverted bottleneck with ReLU6 and a hard-swish."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 8, 1)
        self.deep = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.project = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self.expand(x))
        x = functional.hardswish(self.deep(x))
        return self.head(self.project(x).mean((2, 3)))


class Encoder(nn.Module):
    """One transformer encoder layer, written out."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = self.split(q), self.split(k), self.split(v)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5, dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {Residual: (3, 3, 8, 8), Depthwise: (3, 3, 8, 8), Encoder: (3, 5, 8)}
PRODUCTS = {"node": "/^(?!stem|expand)/", "op": ["Conv", "Gemm", "MatMul"], "set": {"quantize": True}}


def wish(bits: int = 8, grain: str = "tensor", target: str = "virtual", **torch_keys: Any) -> dict[str, Any]:
    """A configuration with these bits everywhere. grain: of the weights.

    For ONNX Runtime all products but stems are asked for: networks this small do not pay in int8.
    """
    return {
        "target": target,
        "rules": [PRODUCTS] if target == "ort" else [],
        "activations": {"bits": bits, "scheme": "asymmetric", "signed": False},
        "weights": {"bits": bits, "granularity": grain},
        "torch": torch_keys,
    }


def quantized(make: type[nn.Module], config: dict[str, Any] | str) -> tuple[QuantModel, Tensor]:
    """A calibrated, frozen model, and inputs beyond its calibrated ranges."""
    torch.manual_seed(1)
    model, shape = make().eval(), SHAPES[make]
    result = QuantModel(model, config, example_inputs=torch.randn(shape))
    calibrate(result, torch.randn(shape), torch.randn(shape)).freeze()
    return result, 1.5 * torch.randn(shape)


def torch_run(model: nn.Module, x: Tensor) -> tuple[NDArray[Any], dict[str, list[NDArray[Any]]]]:
    """The output, and each quantizer's results, call by call."""
    seen: dict[str, list[NDArray[Any]]] = defaultdict(list)
    hooks = [
        q.register_forward_hook(lambda q, _, y: seen[q.site].append(y.detach().numpy().copy()))
        for q in quantizers_of(model)
        if q.active
    ]
    with torch.no_grad():
        y = model(x)
    for hook in hooks:
        hook.remove()
    return y.numpy(), seen


def with_outputs(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """The model with inner tensors given out too."""
    out = onnx.ModelProto.FromString(model.SerializeToString())
    known = {value.name for value in out.graph.output}
    out.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    return out


def ort_run(model: onnx.ModelProto, x: Tensor, names: list[str], *, optimize: bool = False) -> dict[str, NDArray[Any]]:
    """Outputs and inner tensors by name."""
    session = Session(with_outputs(model, names), optimize=optimize)
    return dict(session.run({model.graph.input[0].name: x.numpy()}))


def pairs(exported: Exported) -> dict[str, tuple[str, str]]:
    """Quantizer site -> the tensors in front of and behind its pair, in the quantized model."""
    outputs = {value.name for value in exported.model.graph.output}
    found = {}
    tensors = {plan.site: plan.tensor for plan in exported.plan.sites}
    for site, places in exported.sites.items():
        place = places[0]
        behind, front = name_part(place, "dequantized"), tensors[place].name
        if front in outputs:
            behind, front = front, name_part(place, "float")
        found[site] = (front, behind)
    return found


def assert_same(model: nn.Module, exported: Exported, x: Tensor) -> None:
    """Bit for bit behind every pair, and at the outputs within float rounding.

    Torch and ONNX Runtime may add up in another order, so that a value within 1e-6 of the edge of two levels falls to
    the other side, and what follows differs by whole steps. What a pair gives is therefore compared twice: exactly, for
    what ONNX Runtime put into it, and from end to end, up to such a value if there is one.
    """
    wanted, seen = torch_run(model, x)
    active = {q.site: q for q in quantizers_of(model) if q.active}
    assert set(exported.sites) == set(active) == set(seen)
    tensors = pairs(exported)
    weights = {site for site, q in active.items() if q.role is Role.WEIGHT}
    names = [name for site, both in tensors.items() for name in both if site not in weights or name == both[1]]
    found = ort_run(exported.model, x, names)
    flipped = False
    for site, (front, behind) in tensors.items():
        got = found[behind]
        if site in weights:
            # A Linear's weight may be stored turned.
            assert any(np.array_equal(got, there) for there in (seen[site][0], seen[site][0].T)), site
            continue
        with torch.no_grad():
            given = torch.from_numpy(found.get(front, x.numpy()))
            np.testing.assert_array_equal(got, active[site](given).numpy(), err_msg=site)
        differing = min(int((got != there).sum()) for there in seen[site])
        assert flipped or differing <= 1, site
        flipped = flipped or differing == 1

    output = found[exported.model.graph.output[0].name]
    if flipped:
        np.testing.assert_allclose(output, wanted, atol=4 * step_at_outputs(model))
    else:
        np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5)


def step_at_outputs(model: nn.Module) -> float:
    """The largest step of any activation; one integer more or less moves an output by a few of them at most."""
    active = [found for found in quantizers_of(model) if found.active and found.role is not Role.WEIGHT]
    return max((float(found.qparams().scale.max()) for found in active), default=1e-5)
