"""Forwards that symbols cannot follow are captured by torch.export; transformer modules take their traceable form."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, fx, nn
from torch.nn import functional

from onnxq.errors import CalibrationError, DataError, ModelError
from onnxq.evaluation.accumulator import measure_error
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.torch.nets import Encoder, Network, calibrate
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.tracing.capture import take_graph
from torch_frontend.tracing.tracer import GraphOrigin


@dataclass
class Answer:
    """A result of a kind of its own."""

    logits: Tensor
    hidden: tuple[Tensor, ...]


torch.utils._pytree.register_dataclass(Answer)


class Net(nn.Module):
    """Tests of types, which symbols fail, around attention, batch norm, dropout and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.batch = nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.drop, self.out, self.weight = nn.Dropout(0.3), nn.Linear(8, 4), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, **more: Tensor) -> Answer:
        assert isinstance(x, Tensor)
        y = self.inner(x).relu_()
        split = y.view(y.shape[0], y.shape[1], 2, 4).transpose(1, 2)
        with torch.no_grad():
            position = torch.arange(x.shape[1], device=x.device).float().cos()[:, None]
        bias = None if mask is None else mask[:, None, None, :].bool()
        dropout = 0.1 if self.training else 0.0
        made = functional.scaled_dot_product_attention(split, split, split, attn_mask=bias, dropout_p=dropout)
        made = made.transpose(1, 2).contiguous().view(y.shape) * scale + position
        made = self.norm(self.batch(made.transpose(1, 2)).transpose(1, 2)) @ self.weight
        made = functional.dropout(self.drop(made), 0.2, self.training)
        made += y
        if "extra" in more:
            made = made + more["extra"]
        return Answer(self.out(made), (made,))


class NormsByFunction(nn.BatchNorm2d):
    """A batch norm with a function in its forward, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        mean, var = self.running_mean, self.running_var
        return functional.relu(functional.batch_norm(x, mean, var, self.weight, self.bias, self.training, 0.1, 1e-5))


class Tied(nn.Module):
    """A table that is read as the weight of its Linear, and inputs that are not given in the forward's order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, other: Tensor | None = None) -> Tensor:
        assert isinstance(ids, Tensor)
        y = functional.embedding(ids, self.head.weight)
        if other is not None:
            y = y + 2 * functional.embedding(other, self.head.weight)
        return self.head(y if mask is None else y * mask[..., None])


def capture(net: nn.Module, inputs: Any) -> QuantModel:
    """The network from torch.export's graph."""
    model = QuantModel(net, target="virtual", example_inputs=inputs)
    assert model.origin is GraphOrigin.EXPORTED
    return model


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    made = Net()
    made.batch.running_mean.normal_()
    return made.eval()


@pytest.fixture(scope="module")
def model(net: Net) -> QuantModel:
    # A batch of one: its size must not become a constant.
    return capture(net, {"x": torch.randn(1, 6, 8), "mask": torch.ones(1, 6)})


def test_the_graph_computes_the_same_for_other_sizes_and_checks_its_arguments(net, model):
    x, mask = torch.randn(3, 9, 8), torch.ones(3, 9)
    mask[0, 5:] = 0
    expected, made = net(x, mask=mask), model(x=x, mask=mask)
    assert isinstance(made, Answer)
    torch.testing.assert_close(made.logits, expected.logits)
    torch.testing.assert_close(made.hidden[0], expected.hidden[0])
    # Layers keep their names, and calls get those of their scope.
    assert {"inner.weight", "out.weight", "weight", "input:x", "norm.out"} <= set(model.quantizers)
    assert all(product.reason is None for product in model.products)
    assert not [one for one in model.refusals if one.code in ("R108", "R109")]
    assert model.model.get_submodule("inner").weight.shape == (8, 8)
    assert isinstance(model.model.get_submodule("batch"), nn.BatchNorm1d)
    with pytest.raises(DataError, match="scale"):
        model(x, mask, scale=2.0)
    with pytest.raises(DataError, match="mask"):
        model(x)


@pytest.mark.parametrize("train", [False, True])
def test_dropout_and_batch_norm_follow_the_mode(train: bool):
    torch.manual_seed(0)
    x = torch.randn(3, 9, 8)
    model = capture(Net().train(train), x[:2])
    before = model.model.get_submodule("batch").running_mean.clone()
    model.train()
    assert not torch.equal(model(x).logits, model(x).logits)
    assert not torch.equal(model.model.get_submodule("batch").running_mean, before)
    model.eval()
    torch.testing.assert_close(model(x).logits, model(x).logits, rtol=0, atol=0)
    assert [one.dropout for one in model.modules() if type(one).__name__ == "AttentionDropout"] == [0.1]


def test_batch_norms_in_functions_do_not_keep_a_graph_from_being_taken():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), NormsByFunction(4), nn.Conv2d(4, 4, 3)).eval()
    assert not capture(net, torch.randn(2, 3, 8, 8)).refusals


def test_a_weight_of_a_layer_and_of_functions_has_one_quantizer_and_inputs_stay_apart():
    torch.manual_seed(0)
    net, ids = Tied(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    # One tensor for two arguments, and the one between them left out.
    model = capture(net, {"other": ids, "ids": ids})
    torch.testing.assert_close(model(ids=ids, other=ids + 1), net(ids, other=ids + 1))
    model.prepare_calibration()
    model(ids=ids, other=ids + 1)
    model.calc_qparams().init_qat()
    exported = to_onnx(model.freeze(), {"other": ids, "ids": ids + 1})
    assert [site for site in exported.sites if site == "head.weight"]
    feeds = {"other": ids.numpy(), "ids": ids.numpy() + 1}
    (made,) = Session(exported.model, optimize=False).run(feeds).values()
    torch.testing.assert_close(torch.from_numpy(made), model(ids=ids + 1, other=ids), rtol=1e-4, atol=1e-5)


def test_it_trains_pickles_and_exports_as_trained(model):
    model = pickle.loads(pickle.dumps(model))
    x, mask = torch.randn(3, 9, 8), torch.ones(3, 9)
    calibrate(model, (x, mask)).init_qat()
    model(x, mask).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.model.get_submodule("inner").parameters())
    exported = to_onnx(model.freeze(), {"x": x, "mask": mask})
    assert {"inner.weight", "out.weight", "weight", "input:x"} <= set(exported.sites)


class Fixed(nn.Module):
    """Its graph holds for one number of rows, and with `whole` for one batch; any number of columns is fine."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.inner, self.whole = nn.Linear(1, 4), whole
        self.eval()

    def forward(self, x: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        made = self.inner(x[..., None]).reshape(int(x.shape[0]) if self.whole else x.shape[0], int(x.shape[1]), -1)
        return made if more is None else made + more["shift"]


def test_another_size_than_the_one_that_became_a_constant_is_refused_by_name():
    net, x = Fixed(), torch.randn(2, 6, 5)
    model = capture(net, x)
    torch.testing.assert_close(model(other := torch.randn(3, 6, 7)), net(other))
    for wrong, text in (((2, 3, 10), "has 3 at dimension 1, and was captured with 6"), ((2, 6), "2 dimensions")):
        with pytest.raises(DataError, match=text) as caught:
            model(torch.randn(wrong))
        assert (caught.value.subject, caught.value.code) == ("input 'x'", "Q209")
        assert "example_inputs" in caught.value.fix
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for k in (2, 3, 4):
        torch.testing.assert_close(compiled(torch.full((k, 6, 5), float(k))), model(torch.full((k, 6, 5), float(k))))
    exported = to_onnx(calibrate(model, x).freeze(), x, dynamic_batch=True)
    dims = exported.model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 6, 5]


def test_sizes_are_checked_inside_of_arguments_and_before_anything_is_observed():
    model = capture(Fixed(), {"x": torch.randn(2, 6, 5), "more": {"shift": torch.randn(2, 6, 1)}})
    with pytest.raises(DataError, match="dimension 2") as caught:
        model(torch.randn(2, 6, 5), {"shift": torch.randn(2, 6, 20)})
    assert caught.value.subject == """input "more['shift']\""""
    model.prepare_calibration()
    with pytest.raises(DataError, match="dimension 1"):
        model(torch.randn(2, 5, 6), {"shift": torch.randn(2, 6, 1)})
    with pytest.raises(CalibrationError, match=r"getitem.out, unsqueeze.out"):
        model.calc_qparams()


def test_a_batch_of_one_is_captured_where_the_batch_becomes_a_constant():
    net, x = Fixed(whole=True), torch.randn(1, 6, 5)
    model = capture(net, x)
    torch.testing.assert_close(model(x), net(x))
    with pytest.raises(DataError, match="has 2 at dimension 0, and was captured with 1"):
        model(torch.randn(2, 6, 5))


def test_another_forward_in_train_mode_is_refused():
    def compute(network: Network, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return network.inner(x) * (2 if network.training else 1)

    net = Network(compute, inner=nn.Linear(8, 8)).eval()
    assert [refusal.rule for refusal in capture(net, torch.randn(2, 8)).refusals] == ["mode"]


class Cache:
    """A result that torch cannot take apart."""


@pytest.mark.parametrize(("keyed", "name"), [(True, "cache"), (False, "result 1")])
def test_results_that_the_graph_cannot_return_are_told_by_name(keyed: bool, name: str):
    def compute(network: Network, x: Tensor) -> dict[str, object] | tuple[object, ...]:
        assert isinstance(x, Tensor)
        made = {"out": network.inner(x), "cache": Cache(), "twice": x * 2}
        return made if keyed else tuple(made.values())

    net = Network(compute, inner=nn.Linear(8, 8)).eval()
    model = QuantModel(net, target="virtual", example_inputs=torch.randn(2, 8))
    told = [one for one in model.refusals if one.rule == "results"]
    assert [(one.subject, one.code) for one in told] == [(name, "R108")]
    assert "Cache" in told[0].reason
    assert len(model(torch.randn(2, 8))) == 2


def test_a_graph_module_keeps_its_graph(net):
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval())
    made = take_graph(traced, ())
    assert [str(node.target) for node in made.graph.nodes] == [str(node.target) for node in traced.graph.nodes]
    assert made.origin is GraphOrigin.GIVEN
    model = QuantModel(traced, target="virtual", example_inputs=torch.randn(2, 8))
    assert {"0.weight", "2.weight"} <= set(model.quantizers)


def test_an_exported_module_is_converted():
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)).eval(), torch.randn(2, 8)
    program = torch.export.export(plain, (x,))
    model = QuantModel(program.module(), target="virtual", example_inputs=x)
    torch.testing.assert_close(model(x), plain(x))
    assert {"0.weight", "3.weight"} <= set(model.quantizers)
    assert [one.rule for one in model.refusals] == ["mode"]
    assert isinstance(model.train(), QuantModel)
    with pytest.raises(ModelError, match="module"):
        QuantModel(program)


def test_gradients_pass_where_the_forward_lets_them_pass() -> None:
    """torch.export has an alias for a slice of the whole, as rotary embeddings of part of a head make them."""

    def compute(net: Any, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        y = net.first(x)
        return y[..., :8] + net.second(x).detach()

    plain, x = Network(compute, first=nn.Linear(8, 8), second=nn.Linear(8, 8)), torch.randn(2, 8)
    model = capture(plain, x)
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.model.first.weight.grad, plain.first.weight.grad)
    assert model.model.second.weight.grad is plain.second.weight.grad is None


def test_modules_without_a_forward_in_python_are_refused():
    plain = nn.Sequential(nn.Linear(8, 8)).eval()
    with pytest.raises(ModelError, match="_orig_mod"):
        QuantModel(torch._dynamo.OptimizedModule(plain, torch._dynamo.disable()))
    deprecation = (DeprecationWarning, FutureWarning)
    with pytest.warns(deprecation, match="script"), pytest.raises(ModelError, match=r"TorchScript.*\[Q123\]"):
        QuantModel(torch.jit.script(plain))
    # Quantizers would be quantized a second time.
    for given, cause in ((QuantModel(plain, target="virtual"), "quantizers already"), (nn.Linear, "no module")):
        with pytest.raises(ModelError, match=rf"{cause}.*\[Q123\]"):
            QuantModel(given)


TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"norm_first": True}, {"activation": "gelu"}, {"dropout": 0.1}, {"batch_first": False}]
)
def test_torchs_own_encoder_is_taken_apart_and_quantized(how: dict[str, Any], padded: bool) -> None:
    torch.manual_seed(0)
    net = Encoder(**how).eval()
    if not how.get("batch_first", True):
        net.position = nn.Parameter(net.position.detach()[:, None][:2])
        padded = False
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    inputs = (TOKENS, padding) if padded else (TOKENS,)
    made = QuantModel(net, {"target": "virtual"}, example_inputs=inputs)
    torch.testing.assert_close(made(*inputs), net(*inputs), rtol=1e-5, atol=1e-5)
    assert {r.rule for r in made.refusals} <= {"softmax", "two-operands"}
    assert "encoder.layers.0.self_attn.in_proj_weight" in made.quantizers
    calibrate(made, inputs, asym=True).set_quant()
    assert measure_error(net(*inputs).detach().numpy(), made(*inputs).detach().numpy()).sqnr_db > 20
    made.init_qat()(*inputs).square().sum().backward()
    grads = {name: p.grad for name, p in made.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())


def test_cross_attention_reads_one_weight_in_three_parts() -> None:
    torch.manual_seed(0)
    net, q, kv = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    made = QuantModel(net, target="virtual", example_inputs=(q, kv, kv))
    for got, wanted in zip(made(q, kv, kv), net(q, kv, kv), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert [s for s, one in made.quantizers.items() if one.role is Role.WEIGHT] == ["in_proj_weight", "out_proj.weight"]


def test_encoder_and_decoder_together() -> None:
    torch.manual_seed(0)
    net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    given = {"src": torch.randn(2, 4, 8), "tgt": torch.randn(2, 5, 8), "tgt_mask": mask}
    made = QuantModel(net, target="virtual", example_inputs=given)
    torch.testing.assert_close(made(**given), net(**given), rtol=1e-5, atol=1e-5)
    place = "decoder.layers.0.self_attn"
    wanted = {(f"{place}.add", "two-operands"), (f"{place}.softmax", "softmax")}
    assert {(r.subject, r.rule) for r in made.refusals} == wanted
    made.prepare_calibration()
    made(**given)
    made.calc_qparams().set_quant()
    assert measure_error(net(**given).detach().numpy(), made(**given).detach().numpy()).sqnr_db > 20


def test_attention_with_learned_extra_keys_is_captured_by_a_run() -> None:
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    net, x = Network(lambda m, x: m.attention(x, x, x)[0], attention=attention).eval(), torch.randn(2, 3, 8)
    made = QuantModel(net, target="virtual", example_inputs=x)
    assert made.origin is GraphOrigin.EXPORTED
    assert [(r.subject, r.rule) for r in made.refusals] == [("Network", "mode")]
    assert {"attention.in_proj_weight", "attention.out_proj.weight"} <= set(made.quantizers)
    torch.testing.assert_close(made(x), net(x))
    alone = QuantModel(net, target="virtual")
    assert [r.subject for r in alone.refusals] == ["attention"]
    assert torch.equal(alone(x), net(x))
