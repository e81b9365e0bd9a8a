"""Tracing: names of sites, shapes and arguments by the example, parts that are skipped or not traced, modes, writes."""

import copy
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

from onnxq.errors import ConfigError, DataError
from tests.torch import nets
from torch_frontend.qmodules import WeightQuantized
from torch_frontend.quant_model import QuantModel
from torch_frontend.tracing.modules import Inputs
from torch_frontend.tracing.values import bind_inputs


@pytest.mark.parametrize("make", [nets.ResNet, nets.Mobile, nets.Dense])
@pytest.mark.parametrize("target", ["ort", "virtual"])
def test_conversion_changes_no_value_and_no_module_of_the_users(make: type[nn.Module], target: str) -> None:
    torch.manual_seed(0)
    model, x = nets.settled(make()), nets.images()
    before = copy.deepcopy(model.state_dict())
    expected = model(x)
    quantized = QuantModel(model, target=target, example_inputs=x)
    torch.testing.assert_close(quantized(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(isinstance(module, WeightQuantized) for module in model.modules())


def test_parameters_keep_their_names_and_with_copy_false_their_identity() -> None:
    model = nets.settled(nets.ResNet())
    quantized = QuantModel(model, {"target": "virtual", "torch": {"fuse_bn": False}}, copy=False)
    theirs = dict(quantized.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert theirs[name] is parameter
    assert isinstance(quantized.model.get_submodule("layer1.0.conv1"), nn.Conv2d)


def test_sites_are_named_after_modules_and_the_calls_of_one() -> None:
    quantized = QuantModel(nets.settled(nets.ResNet()), target="virtual", example_inputs=nets.images())
    sites = list(quantized.quantizers)
    assert sites[0] == "input:x"
    assert {"layer1.0.relu.out", "layer1.0.relu@1.out", "layer1.0.add.out", "layer1.1.conv2.weight"} <= set(sites)
    assert sites.index("fc.weight") == len(sites) - 1


def test_a_module_of_functions_alone_may_call_one_that_modules_have_as_a_method() -> None:
    cast = nets.Network(lambda _, x: x.to(torch.float32).float())
    model, x = nn.Sequential(nn.Linear(4, 4), cast, nn.Linear(4, 4)), torch.randn(2, 4)
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert {"1.to_1", "1.float_1"} <= {name for name, _ in quantized.model.named_modules()}


def test_shared_layers_and_tied_weights_have_one_quantizer_and_a_site_for_each_call() -> None:
    conv, tied = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    tied.weight = conv.weight
    net = nets.Network(lambda m, x: m.other(m.again(m.conv(x))), conv=conv, other=tied, again=conv)
    quantized = QuantModel(net, target="virtual")
    assert list(quantized.quantizers) == ["input:x", "conv.out", "conv@1.out", "conv.weight"]
    assert len({id(m) for m in quantized.modules() if isinstance(m, WeightQuantized)}) == 2
    one, other = quantized.model.get_submodule("conv"), quantized.model.get_submodule("other")
    assert one.weight is other.weight
    assert one.weight_quantizer is other.weight_quantizer


def test_a_tied_embedding_shares_the_quantizer_of_the_head() -> None:
    quantized = QuantModel(nets.Encoder().eval(), target="virtual")
    assert "embed.weight" in quantized.quantizers
    assert "head.weight" not in quantized.quantizers
    assert quantized.model.get_submodule("head").weight is quantized.model.get_submodule("embed").weight


def test_parts_of_a_split_have_sites_of_their_own_and_constants_stay() -> None:
    def compute(network: Any, x: Tensor) -> dict[str, Tensor]:
        p, q = network.a(x).chunk(2, 1)
        both = network.b(p) + network.c(q) * torch.full((1,), 2.0)
        return {"out": functional.interpolate(both, size=x.shape[2:], mode="bilinear"), "q": q}

    parts = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(4, 4, 1), "c": nn.Conv2d(4, 4, 1)}
    model, x = nets.Network(compute, **parts).eval(), nets.images()
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert {"chunk.out0", "chunk.out1"} <= set(quantized.quantizers)
    assert not quantized.refusals
    got, wanted = quantized(x), model(x)
    assert all(torch.equal(got[name], wanted[name]) for name in ("out", "q"))


def test_skipped_modules_stay_float_and_are_a_decision() -> None:
    config = {"target": "virtual", "torch": {"skip_trace": ["layer1.1", "fc"]}}
    quantized = QuantModel(nets.settled(nets.ResNet()), config, example_inputs=nets.images())
    assert [site for site in quantized.quantizers if site.startswith(("layer1.1", "fc"))] == ["layer1.1.out"]
    assert type(quantized.model.get_submodule("layer1.1")) is nets.Block
    assert [d.subject for d in quantized.decisions if d.rule == "skip-trace"] == ["layer1.1", "fc"]
    assert not quantized.refusals


def test_a_skip_pattern_without_a_module_is_a_typo() -> None:
    with pytest.raises(ConfigError, match=r"layer2.*matches no module"):
        QuantModel(nets.ResNet(), {"target": "virtual", "torch": {"skip_trace": "layer2.*"}})


def test_a_part_that_cannot_be_traced_is_named_and_its_layers_are_quantized() -> None:
    model, x = nets.Around().eval(), torch.randn(3, 16)
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert [(r.subject, "control flow" in r.reason) for r in quantized.refusals] == [("inside", True)]
    inner = [site for site in quantized.quantizers if site.startswith("inside.")]
    assert inner == ["inside.out", "inside.first.in", "inside.second.in", "inside.third.in", "inside.first.weight",
                     "inside.second.weight", "inside.third.weight"]  # fmt: skip


def test_a_subclass_that_computes_something_else_is_looked_into() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return functional.conv2d(x, weight, self.bias, self.stride, self.padding)

    model, x = nn.Sequential(Standardized(3, 4, 3)), nets.images()
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert list(quantized.quantizers) == ["input:input", "0.sub.out"]
    assert torch.equal(quantized(x), model(x))
    nets.calibrate(quantized, x).set_quant()
    weight = quantized.weights()["0.sub.out"]
    torch.testing.assert_close(weight, model[0].weight - model[0].weight.mean((1, 2, 3), keepdim=True))
    assert not torch.equal(quantized(x), model(x))


def _modes(network: Any, x: Tensor) -> Tensor:
    x = functional.dropout(network.drop(network.fc(x)), 0.1, network.training)
    return x * 2.0 if network.training else x


def test_a_forward_that_differs_between_train_and_eval_says_so() -> None:
    for mode, lost in ((False, "train"), (True, "eval")):
        net = nets.Network(_modes, fc=nn.Linear(4, 4), drop=nn.Dropout(0.5)).train(mode)
        (refusal,) = QuantModel(net, target="virtual").refusals
        assert (refusal.subject, refusal.rule) == ("Network", "mode")
        assert f"other things in {lost} mode" in refusal.reason
    model = nets.settled(nets.ResNet())
    model.bn.train()
    assert not QuantModel(model, {"target": "virtual", "torch": {"fuse_bn": False}}, copy=False).refusals
    assert (model.training, model.bn.training, model.stem.training) == (False, True, False)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0, **_: Tensor) -> Tensor:
        x = self.fc(x) * scale
        return x if mask is None else x * mask


def test_an_argument_nobody_passes_keeps_its_default_and_says_so() -> None:
    model, x, mask = _Masked(), torch.randn(2, 4), torch.tensor([1.0, 0.0, 1.0, 0.0])
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert torch.equal(quantized(x, None, scale=2.0), model(x))
    assert [d.subject for d in quantized.decisions if d.rule == "arguments"] == ["mask", "scale"]
    for given in ({"mask": mask}, {"scale": 3.0}):
        with pytest.raises(DataError, match="fixed at its default"):
            quantized(x, **given)
    masked = QuantModel(model, target="virtual", example_inputs={"x": x, "mask": mask})
    assert torch.equal(masked(x, mask), model(x, mask))


class _Sum(_Masked):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.fc(sum(more, x))


def test_arguments_without_names_are_as_many_as_in_the_example() -> None:
    model, several = _Sum(), tuple(torch.randn(3, 2, 4))
    quantized = QuantModel(model, target="virtual", example_inputs=several)
    assert torch.equal(quantized(*several), model(*several))
    quantized.prepare_calibration()(*several)
    quantized.calc_qparams(asym=True).set_quant()
    assert quantized.quantization_error([several], mode="cumulative")["output"] > 20


def test_an_example_that_does_not_fit_says_so() -> None:
    with pytest.raises(DataError, match="do not fit"):
        QuantModel(_Masked(), target="virtual", example_inputs=(1, 2, 3, 4))
    with pytest.raises(DataError, match="does not run"):
        QuantModel(_Masked(), target="virtual", example_inputs=torch.randn(2, 5))


class _Shapes(nn.Module):
    """Usual code on shapes, types and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if x.dim() == 2 or len(x.shape) < 3:
            x = x.unsqueeze(0)
        assert x.shape[-1] == 8
        split = x.size()[:-1] + (2, 4)  # noqa: RUF005 - as people write it
        x = self.drop(self.fc(x)).view(*split)
        parts = [part * 2.0 for part in x.unbind(-2)]
        if x.dtype == torch.float16:
            parts = parts[:1]
        y = self.norm(torch.cat(parts, -1).transpose(1, 2)[:, :4].contiguous())
        for other in more:
            y = y + other
        return y


def test_control_flow_on_shapes_goes_the_examples_way_and_says_so() -> None:
    torch.manual_seed(0)
    model, x, other = _Shapes(), torch.randn(3, 5, 8), torch.randn(3, 4, 5)
    before = copy.deepcopy(model.state_dict())
    assert [r.rule for r in QuantModel(copy.deepcopy(model).eval(), target="virtual").refusals] == ["tracing"]
    for mode in (True, False):
        quantized = QuantModel(model.train(mode), target="virtual", example_inputs=(x, other))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not quantized.refusals
    assert [d.subject for d in quantized.decisions if d.rule == "shapes"] == ["_Shapes"]
    assert {"input:x", "fc.weight"} <= set(quantized.quantizers)
    torch.testing.assert_close(quantized(x, other), model(x, other))
    torch.testing.assert_close(quantized(x[:2], other[:2]), model(x[:2], other[:2]))


def test_control_flow_on_values_is_not_decided_by_the_example() -> None:
    for example in (None, torch.ones(3, 16)):
        assert not QuantModel(nets.Branching(), target="virtual", example_inputs=example).traced


def _write(network: Any, x: Tensor) -> Tensor:
    """In-place activations whose input is read again, as pre-activation networks have them."""
    x = x * 1.0
    y = network.conv(network.relu(x))
    z = functional.relu(y, inplace=True)
    y = y + x
    y.clamp_(max=1.0)
    return y + z


def test_what_an_in_place_call_wrote_is_what_later_readers_get() -> None:
    parts = {"relu": nn.ReLU(inplace=True), "conv": nn.Conv2d(3, 3, 3, padding=1)}
    model, x = nets.Network(_write, **parts), nets.images()
    expected = model(x.clone())
    given = x.clone()
    torch.testing.assert_close(QuantModel(model, target="virtual")(given), expected, rtol=0, atol=0)
    assert torch.equal(given, x)


@pytest.mark.parametrize(("always", "mode"), [(False, False), (False, True), (True, False)])
def test_a_functional_dropout_follows_the_mode_unless_it_is_told_to_drop_always(always: bool, mode: bool) -> None:
    net = nets.Network(lambda m, x: functional.dropout(m.fc(x), 0.5, always or m.training), fc=nn.Linear(16, 16))
    quantized, x = QuantModel(net.train(mode), target="virtual"), torch.ones(8, 16)
    assert always or torch.equal(quantized.eval()(x), quantized(x))
    assert not always or (quantized.eval()(x) == 0).any()
    assert (quantized.train()(x) == 0).any()


def test_an_input_given_twice_is_told_from_one_that_is_not_there() -> None:
    net, x = nets.settled(nets.Mobile()), nets.images()
    model = QuantModel(net, example_inputs=x)
    name = next(iter(inspect.signature(net.forward).parameters))
    graph = model.model.graph
    with pytest.raises(DataError, match=f"input '{name}': is given by position and by name") as twice:
        bind_inputs(graph, Inputs((x,), {name: x}))
    assert twice.value.code == "Q205"
    with pytest.raises(DataError, match=r"input 'none': is none of the model's.*\[Q208\]"):
        bind_inputs(graph, Inputs((x,), {"none": x}))
