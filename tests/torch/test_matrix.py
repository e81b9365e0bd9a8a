"""Every target with every quantizer on every pattern: calibrated, trained, exported, and the same in ONNX Runtime.

The patterns of a target stand beside each other in one model, so that one export does for all.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from onnxq.errors import CalibrationError, ConfigError
from onnxq.numerics import find_saturating_sums, quantize
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.cpus.kernels import cpu_saturates
from tests.torch.exporting import pairs, step_at_outputs, with_outputs
from tests.torch.nets import observe
from torch_frontend import qat
from torch_frontend.export import Exported, to_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import AdaRound, Quantizer

EVERYTHING = {"op": "*", "set": {"quantize": True}}
TARGETS = ("ort", "trt", "virtual")


class Convs(nn.Module):
    """Convolutions in a row: with a ReLU, with a ReLU6, and with a ReLU, in front of it a sum, if adds."""

    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self.relu, self.relu6, self.last = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.relu6(F.relu(self.relu(x))))
        y = self.last(x)
        return F.relu(y + x if self.adds else y)


class Attention(nn.Module):
    """Attention, and a layer with a GELU in front of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1)
        return self.down(F.gelu(self.up((weights @ v).transpose(1, 2).flatten(2))))


# An export's time is that of its nodes, so that patterns share what leads from one to the next.
PATTERNS: dict[str, Any] = {
    "conv_relu_relu6_add": Convs,
    "conv_relu_relu6": lambda: Convs(adds=False),
    "attention_gelu": Attention,
}
# Quantizer of weights and of activations.
PARTS = {
    "uniform": ("uniform", "uniform"),
    "lsq": ("lsq", "lsq"),
    "lsq_plus": ("lsq+", "lsq+"),
    "pact": ("lsq", "pact"),
    "dorefa": ("dorefa", "dorefa"),
    "adaround": ("adaround", "uniform"),
}


# DoReFa's activations are refused for signed types, and for values below 0.
KINDS = {target: [kind for kind in PARTS if kind != "dorefa" or target != "trt"] for target in TARGETS}
CELLS = {
    target: [
        (kind, pattern)
        for kind in kinds
        for pattern in (("conv_relu_relu6",) if kind == "dorefa" else ("conv_relu_relu6_add", "attention_gelu"))
    ]
    for target, kinds in KINDS.items()
}


class Matrix(nn.Module):
    """All patterns with all quantizers that a target takes."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.cells = nn.ModuleDict({f"{kind}_{pattern}": PATTERNS[pattern]() for kind, pattern in CELLS[target]})

    def forward(self, images: Tensor, tokens: Tensor) -> list[Tensor]:
        return [cell(images if isinstance(cell, Convs) else tokens) for cell in self.cells.values()]


def make_config(target: str) -> dict[str, Any]:
    """The target's defaults, and a rule for each quantizer; nets this small do not pay in int8 unless asked for."""
    rules: list[dict[str, Any]] = [{"tensor": "input:*", "set": {"quantize": True}}]
    # The first rule that matches holds: `lsq_plus` before `lsq`.
    for kind in sorted(KINDS[target], reverse=True):
        for role, name in zip(("weight", "activation"), PARTS[kind], strict=True):
            # DoReFa's levels need one bit more than they are.
            bits = {"bits": 7} if (role, name) == ("weight", "dorefa") else {}
            change = {"quantizer": name, "quantize": True, **bits}
            rules.append({"node": f"cells.{kind}_*", "role": role, "set": change})
    return {"target": target, "rules": rules}


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained and exported matrix, and the values of its parts in torch and in ONNX Runtime.

    moved: parameters that the step changed. found: outputs and the tensors around every pair, as the file says; fast:
    outputs as users run it.
    """

    model: QuantModel
    exported: Exported
    grads: dict[str, Tensor | None]
    moved: set[str]
    outputs: list[NDArray[Any]]
    found: dict[str, NDArray[Any]]
    fast: dict[str, NDArray[Any]]


@cache
def train(target: str) -> Trained:
    torch.manual_seed(0)
    net = Matrix(target)
    # Weights that fill their range evenly, so that many 16-bit sums would overflow.
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4) if parameter.dim() > 1 else nn.init.zeros_(parameter)
    inputs = {"images": torch.rand(2, 4, 6, 6), "tokens": torch.randn(2, 5, 8)}
    model = QuantModel(net.eval(), make_config(target), example_inputs=inputs)
    with qat.observing(model):
        model(**inputs)
    for site, quantizer in model.quantizers.items():
        if isinstance(quantizer, AdaRound):
            quantizer.start_learning(model.weights()[site]).data.normal_()
            quantizer.stop_learning()
    model.init_qat()
    optimizer = torch.optim.Adam(qat.parameter_groups(model, lr=2e-3))
    qat.Pacer(model, qat.Schedule()).attach(optimizer)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    # Wider than what was seen, so that values are clipped and offsets have gradients.
    outputs = model(**{name: 2 * value for name, value in inputs.items()})
    (sum(one.square().mean() for one in outputs) + qat.penalty(model)).backward()
    optimizer.step()
    after = dict(model.named_parameters())
    exported = to_onnx(model.freeze(), inputs)
    weights = {site for site, q in model.quantizers.items() if q.role is Role.WEIGHT}
    names = [one for site, both in pairs(exported).items() for one in both if site not in weights or one == both[1]]
    fed = {name: value.numpy() for name, value in inputs.items()}
    with torch.no_grad():
        said = [one.numpy() for one in model(**inputs)]
    return Trained(
        model=model,
        exported=exported,
        grads={name: value.grad for name, value in after.items()},
        moved={name for name, value in after.items() if not torch.equal(value, before[name])},
        outputs=said,
        found=fed | Session(with_outputs(exported.model, names), optimize=False).run(fed),
        fast=dict(Session(exported.model).run(fed)),
    )


# One test for a target: each process that runs a part of it would train and export it anew, which takes 20 s.
@pytest.mark.parametrize("target", TARGETS)
def test_every_cell_trains_and_exports_what_it_trained(target: str) -> None:
    for kind, pattern in CELLS[target]:
        print(f"{kind} {pattern}")
        _check_cell(target, kind, pattern)
    for kind in PARTS if target == "ort" else ():
        print(f"sums of {kind}")
        _check_sums(kind)


def _check_cell(target: str, kind: str, pattern: str) -> None:
    made, prefix = train(target), f"cells.{kind}_{pattern}."
    quantizers = {site: q for site, q in made.model.quantizers.items() if site.startswith(prefix) and q.active}
    kinds = [{q.name for q in quantizers.values() if (q.role is Role.WEIGHT) is weights} for weights in (True, False)]
    assert kinds == [{name} for name in PARTS[kind]]
    _check_training(made, prefix, quantizers)
    _check_pairs(made, quantizers)
    _check_outputs(made, list(made.model.model.get_submodule("cells")._modules).index(prefix.split(".")[1]), target)


def _check_training(made: Trained, prefix: str, quantizers: dict[str, Quantizer]) -> None:
    names = {id(value): name for name, value in made.model.named_parameters()}
    slots = [names[id(getattr(q, slot))] for q in quantizers.values() for slot in q.learned]
    weights = [name for name in names.values() if name.startswith(f"model.{prefix}") and name.endswith(".weight")]
    assert len(weights) == 3
    assert set(weights) <= made.moved
    for name in (*weights, *slots):
        assert made.grads[name] is not None, name
        assert made.grads[name].isfinite().all(), name
    # Single ones may be at the end of their domain, such as the offset of values that are never negative.
    assert not slots or set(slots) & made.moved


def _check_pairs(made: Trained, quantizers: dict[str, Quantizer]) -> None:
    """Each pair gives the bits of its quantizer."""
    tensors, weights = pairs(made.exported), made.model.weights()
    for site, quantizer in quantizers.items():
        front, behind = tensors[site]
        got = made.found[behind]
        given = weights[site] if quantizer.role is Role.WEIGHT else torch.from_numpy(made.found[front])
        with torch.no_grad():
            wanted = quantizer(given).numpy()
        # A Linear's weight may be stored turned.
        assert np.array_equal(got, wanted) or np.array_equal(got, wanted.T), site


def _check_outputs(made: Trained, index: int, target: str) -> None:
    """Equal up to the order of sums, which may move a value on the edge of two levels to the other, by one step."""
    name, wanted = made.exported.model.graph.output[index].name, made.outputs[index]
    step = step_at_outputs(made.model)
    np.testing.assert_allclose(made.found[name], wanted, atol=step, rtol=0)
    assert (np.abs(made.found[name] - wanted) > 1e-5).mean() < 0.1
    # Integer kernels round biases and sums. Only target ort keeps its weights from overflowing the sums of some CPUs.
    if target == "ort" or not cpu_saturates():
        np.testing.assert_allclose(made.fast[name], wanted, atol=2 * step, rtol=0)


def _check_sums(kind: str) -> None:
    """No sum of 16 bits overflows after training."""
    made, bound = train("ort"), 0
    for site, weight in made.model.weights().items():
        quantizer = made.model.quantizers[site]
        if site.startswith(f"cells.{kind}_") and quantizer.sum_orders():
            codes = quantize(quantizer(weight).detach().numpy(), quantizer.qparams(), quantizer.spec)
            assert not any(find_saturating_sums(codes, order).any() for order in quantizer.sum_orders()), site
            bound += 1
    assert bound >= (3 if kind == "dorefa" else 6)
    assert not made.exported.plan.warnings


@pytest.mark.parametrize(
    ("target", "kind", "quantizer", "sentence"),
    [
        # Values below 0, a type with a sign, and bits.
        ("virtual", "activations", "dorefa", "values down to -"),
        ("trt", "activations", "dorefa", r"lie in \[0, 1\]"),
        ("virtual", "weights", "dorefa", "9-bit integers"),
        ("ort", "weights", "pact", "activations and outputs only"),
        ("ort", "activations", "adaround", "weights only"),
        ("virtual", "activations", "pact", "no value above zero was seen"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_site(target: str, kind: str, quantizer: str, sentence: str) -> None:
    config = {"target": target, "torch": {kind: {"quantizer": quantizer}}, "rules": [EVERYTHING]}
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = -torch.ones(4, 8) if quantizer == "pact" else torch.randn(4, 8)
    with pytest.raises((ConfigError, CalibrationError), match=rf"^(input:input|0\.weight|1\.out).*{sentence}"):
        observe(QuantModel(net, config, example_inputs=x), x)
