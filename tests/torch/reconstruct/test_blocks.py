"""Layers and blocks found in graphs: their values are the model's, and learning them lowers the error."""

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn

from onnxq.errors import ConfigError
from tests.torch.nets import Network, calibrate
from tests.torch.reconstruct.kit import values
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import AdaRound
from torch_frontend.reconstruct import Settings, reconstruct
from torch_frontend.reconstruct.units import Regions, graph_unit
from torch_frontend.tracing.modules import Inputs

CONFIG = {"target": "virtual", "weights": {"bits": 4, "granularity": "channel"}, "activations": {"bits": 8}}
Tensor = torch.Tensor


def conv(a: int, b: int) -> nn.Conv2d:
    return nn.Conv2d(a, b, 3, padding=1)


class Squeeze(nn.Module):
    """A squeeze-and-excitation block inside an inverted residual."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.shrink = conv(4, 8), conv(8, 4)
        self.down, self.up = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.expand(x))
        y = y * torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return x + self.shrink(y)


def make_mobile() -> Network:
    parts = {"stem": conv(1, 4), "block": Squeeze(), "last": conv(4, 3)}
    return Network(lambda m, x: m.last(m.block(torch.relu(m.stem(x)))), **parts)


class UNet(nn.Module):
    """A long skip around everything, and a residual block inside."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = conv(1, 4), conv(8, 2)
        self.down, self.one, self.two = conv(4, 4), conv(4, 4), conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.enter(x))
        b = torch.relu(self.down(nn.functional.max_pool2d(a, 2)))
        b = b + self.two(torch.relu(self.one(b)))
        return self.leave(torch.cat([a, nn.functional.interpolate(b, scale_factor=2.0)], 1))


class Encoder(nn.Module):
    """A transformer block whose reshapes take sizes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Two(nn.Module):
    """Two inputs, two outputs, a weight that a function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Parameter(values(6, 4))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        both = self.left(a) + self.right(b)
        return both @ self.table, both


def calibrated(net: nn.Module, *x: Tensor) -> QuantModel:
    return calibrate(QuantModel(net.eval(), CONFIG, example_inputs=x).eval(), x).set_quant()


NETS = {
    "mobile": (make_mobile, (values(6, 1, 8, 8),)),
    "unet": (UNet, (values(6, 1, 8, 8),)),
    "encoder": (Encoder, (values(6, 5, 16),)),
    "two": (Two, (values(6, 6), values(6, 6, seed=1))),
}


@pytest.mark.parametrize("name", NETS)
def test_units_compute_what_the_model_computes_there(name: str) -> None:
    net, x = NETS[name]
    torch.manual_seed(0)
    model = calibrated(net(), *x)
    regions = Regions(model.model)
    found = {(r.name, r.exit): r for r in [*regions.list_layers(), *regions.list_blocks(8), *regions.list_blocks(1)]}
    assert found
    seen: dict[fx.Node, Tensor] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            seen[n] = super().run_node(n)
            return seen[n]

    with torch.no_grad():
        Watch(model.model).run(*x)
        for region in found.values():
            unit = graph_unit(model.model, region)
            ((inputs, output),) = unit.catch(Inputs(x, {}))
            assert torch.equal(output, seen[region.exit])
            assert torch.equal(unit.run(*inputs), output)
            if all(isinstance(v, Tensor) for v in inputs):  # and on other numbers of samples
                # Matrix products of other sizes may take other kernels, which add in another order.
                torch.testing.assert_close(unit.run(*(v[:2] for v in inputs)), unit.run(*inputs)[:2])


@pytest.mark.parametrize(
    ("net", "most", "names", "exits"),
    [
        # Activations behind a layer belong to it.
        (
            "mobile",
            0,
            ["stem", "block.expand", "block.down", "block.up", "block.shrink", "last"],
            ["relu", "block.relu", "block.relu_1", "block.sigmoid", "block.shrink", "last"],
        ),
        # A block holds the smaller ones inside it.
        ("mobile", 8, ["stem", "block", "last"], ["relu", "block.add", "last"]),
        ("mobile", 3, ["stem", "block.expand", "block", "block.shrink", "last"], None),
        # Long skips hide none.
        ("unet", 2, None, ["relu", "relu_1", "add", "leave"]),
        ("encoder", 8, None, ["add", "add_1"]),
    ],
)
def test_layers_and_blocks(net: str, most: int, names: list[str] | None, exits: list[str] | None) -> None:
    make, x = NETS[net]
    regions = Regions(calibrated(make(), *x).model)
    found = regions.list_blocks(most) if most else regions.list_layers()
    assert names is None or [region.name for region in found] == names
    assert exits is None or [regions.find_path(region.exit) for region in found] == exits


def fork_and_join() -> nn.Module:
    """A network with a module that hands two values on."""
    fork = Network(lambda m, x: (m.one(x), m.two(x)), one=nn.Linear(6, 6), two=nn.Linear(6, 6))

    def join(network: Network, x: Tensor) -> Tensor:
        a, b = network.inner(x)
        return network.last(a) * b

    return Network(join, inner=fork, last=nn.Linear(6, 6))


def test_blocks_by_name() -> None:
    torch.manual_seed(0)
    model = calibrated(make_mobile(), values(16, 1, 8, 8))
    done = reconstruct(
        model, [values(16, 1, 8, 8)], "brecq", blocks=["last", "block"], settings=Settings(iterations=30, lr=0.03)
    )  # fmt: skip
    assert [(unit.name, len(unit.sites)) for unit in done.units] == [("block", 4), ("last", 1)]
    assert model.quantizers["stem.weight"].v is None
    with pytest.raises(ConfigError, match=r"block 'blok'.*\n.*block"):
        reconstruct(model, [values(4, 1, 8, 8)], "brecq", blocks=["blok"])
    with pytest.raises(ConfigError, match=r"is left by 2 values"):
        Regions(calibrated(fork_and_join(), values(4, 6)).model).find_named(["inner"])
    regions = Regions(calibrated(Two(), values(4, 6), values(4, 6)).model)
    assert [r.name for r in regions.find_named(["left"])] == ["left"]


def test_transformers_and_weights_of_functions_learn_too() -> None:
    torch.manual_seed(0)
    x = (values(24, 2) @ values(2, 80, seed=1)).reshape(24, 5, 16)
    done = reconstruct(calibrated(Encoder(), x), x.split(9), "brecq", settings=Settings(iterations=100, lr=0.03))
    assert [len(unit.sites) for unit in done.units] == [2, 2]
    assert all(unit.kept for unit in done.units)
    a, b = values(24, 2) @ values(2, 6, seed=1), values(24, 2, seed=2) @ values(2, 6, seed=3)
    model = calibrated(Two(), a, b)
    done = reconstruct(model, [(a, b)], "adaround", settings=Settings(iterations=150, lr=0.03))
    assert {site for unit in done.units for site in unit.sites} == {"left.weight", "right.weight", "table"}
    assert all(isinstance(model.quantizers[site], AdaRound) for site in ("left.weight", "right.weight", "table"))
