"""Where quantizers stand: by target, by rules, by multi-input policies, and as the engine would place them."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from onnxq.backends import load_config
from onnxq.errors import ConfigError
from onnxq.sites import Role
from onnxq.spec import PerBlock
from tests.torch.exporting import PRODUCTS
from tests.torch.nets import Branching, Encoder, Network, ResNet, calibrate, images, settled
from torch_frontend.quant_model import Follower, QuantModel

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])


def place(config: Any, net: nn.Module | None = None, x: Tensor | None = None, **how: Any) -> QuantModel:
    return QuantModel(settled(net or ResNet()), config, example_inputs=images() if x is None else x, **how)


def test_for_onnx_runtime_what_does_not_pay_at_the_example_s_size_stays_float() -> None:
    quantized = place("ort-int8")
    assert not quantized.quantizers
    assert {r.rule for r in quantized.left_float} == {"stem", "size"}
    unsized = QuantModel(settled(ResNet()), "ort-int8")
    assert len([q for q in unsized.quantizers.values() if q.role is Role.WEIGHT]) == 6


def test_for_onnx_runtime_pairs_stand_behind_activations_and_what_moves_values_shares_their_scale() -> None:
    quantized = place({"extends": "ort-int8", "rules": [PRODUCTS]})
    found = {site: q for site, q in quantized.quantizers.items() if q.role is Role.ACTIVATION and not q.disabled_reason}
    block = ["layer1.{}.relu.out", "layer1.{}.conv2.out", "layer1.1.down.0.out", "layer1.{}.relu@1.out"]
    wanted = ["max_pool2d.out", *(site.format(0) for site in block if "down" not in site)]
    wanted += [*(site.format(1) for site in block), "adaptive_avg_pool2d.out", "flatten.out"]
    assert list(found) == wanted
    assert not quantized.refusals
    assert [(r.subject, r.rule) for r in quantized.left_float] == [("stem", "stem")]
    assert not [d for d in quantized.decisions if d.rule != "fuse-bn"]
    calibrate(quantized, images())
    assert [site for site, q in found.items() if isinstance(q, Follower)] == ["flatten.out"]
    pooled, flat = (quantized.quantizers[name] for name in ("adaptive_avg_pool2d.out", "flatten.out"))
    assert flat.scale is pooled.scale
    assert flat.qparams().scale == pooled.qparams().scale


def test_attention_is_quantized_for_tensorrt_when_asked_for() -> None:
    model = Encoder().eval()
    left = place("trt-int8", model, TOKENS)
    assert [r.rule for r in left.left_float] == ["attention", "attention"]
    asked = place({"extends": "trt-int8", "attention": "quantized"}, model, TOKENS)
    assert not asked.refusals
    assert len(set(asked.quantizers) - set(left.quantizers)) == 10
    torch.testing.assert_close(asked(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_what_runs_as_one_kernel_is_not_cut_by_a_quantizer() -> None:
    quantized = place({"target": "virtual"})
    decided = {d.subject: d.reason for d in quantized.decisions if d.rule == "disable-redundant"}
    assert decided["stem.out"] == "conv and relu run as one kernel"
    assert decided["layer1.0.add.out"] == "add and relu run as one kernel"
    assert all(quantized.quantizers[site].disabled_reason == reason for site, reason in decided.items())
    whole = place({"target": "virtual", "torch": {"disable_redundant": False}})
    assert not any(q.disabled_reason for q in whole.quantizers.values())


def test_rules_match_modules_operators_in_both_tongues_sites_and_stretches() -> None:
    rules = [
        {"node": "fc", "role": "weight", "set": {"bits": 2}},
        {"between": ["layer1.0.conv1", "layer1.0.add"], "set": {"float": True}},
        {"op": "Conv", "role": "weight", "set": {"bits": 3, "quantizer": "lsq"}},
        {"op": "conv", "role": "activation", "set": {"bits": 5}},
        {"tensor": "flatten.out", "set": {"bits": 7, "scheme": "symmetric"}},
        {"node": "layer1.1.*", "set": {"float": True}},
    ]
    found = place({"target": "virtual", "rules": rules}).quantizers
    assert found["fc.weight"].spec.bits == 2
    assert "layer1.0.conv1.weight" not in found
    assert (found["stem.weight"].spec.bits, found["stem.weight"].name) == (3, "lsq")
    assert found["input:x"].spec.bits == 5
    assert (found["flatten.out"].spec.bits, found["flatten.out"].spec.symmetric) == (7, True)
    # Conv rules come first, so the last one leaves float what is no convolution.
    assert "layer1.1.conv1.weight" in found
    assert "layer1.1.down.0.out" not in found


@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
def test_a_target_brings_the_defaults_of_its_preset(target: str) -> None:
    net, preset = nn.Linear(3, 2), f"{target}-int8"
    keys = ((None, target), ({"target": target}, None), ({"mode": "static"}, target), ({"extends": preset}, None))
    for config, name in keys:
        how = {} if name is None else {"target": name}
        made = QuantModel(net, **how) if config is None else QuantModel(net, config, **how)
        assert made.quant_config.model_dump() == load_config(preset).model_dump()


def test_a_target_that_cannot_hold_what_is_asked_says_so_at_once() -> None:
    with pytest.raises(ConfigError, match="asymmetric"):
        QuantModel(ResNet(), "ort-int8", target="trt")
    with pytest.raises(ConfigError, match="no configuration"):
        QuantModel(ResNet(), 3)  # type: ignore[arg-type]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, shift: Tensor) -> Tensor:
        return self.fc(self.table(ids + shift))


def test_integers_found_in_the_first_batch_are_left_alone() -> None:
    ids = torch.tensor([[1, 2]])
    quantized = calibrate(QuantModel(Counts(), target="virtual"), (ids, ids))
    off = {site for site, q in quantized.quantizers.items() if q.disabled_reason == "integers flow here"}
    assert off == {"input:ids", "input:shift"} == {d.subject for d in quantized.decisions if d.rule == "integers"}


def test_a_product_of_two_activations_is_forced_by_a_rule() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

    assert [r.rule for r in QuantModel(Product(), "trt-int8").left_float] == ["product"]
    force = {"extends": "trt-int8", "rules": [{"op": "MatMul", "set": {"quantize": True}}]}
    assert list(QuantModel(Product(), force).quantizers) == ["input:x", "input:y"]


def join(network: Any, x: Tensor) -> Tensor:
    """A sum and a concat of two convolutions' results."""
    a, b = network.a(x), 3.0 * network.b(x)
    return network.c(torch.cat([a, b], 1)) + (a + b)


def policies(**how: Any) -> QuantModel:
    torch.manual_seed(0)
    net = Network(join, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1), c=nn.Conv2d(8, 4, 1)).eval()
    made = QuantModel(net, {"target": "virtual", "torch": {"multi_input": how}}, example_inputs=images())
    return calibrate(made, images())


def test_insert_gives_every_input_its_own_numbers() -> None:
    found = policies(cat="insert", add="none").quantizers
    assert "cat.out" in found
    assert not any(isinstance(q, Follower) for q in found.values())
    assert not torch.equal(found["a.out"].scale, found["mul.out"].scale)


def test_share_gives_all_inputs_and_the_joined_tensor_the_widest_range() -> None:
    found = policies(cat="share", add="none").quantizers
    leaders = {site: q.leader.site for site, q in found.items() if isinstance(q, Follower)}
    assert leaders == {"mul.out": "a.out", "cat.out": "a.out"}
    own = policies(cat="insert", add="none").quantizers
    assert found["a.out"].scale is found["mul.out"].scale
    torch.testing.assert_close(found["a.out"].scale, own["cat.out"].scale)


def test_follow_takes_the_range_of_the_named_input() -> None:
    own = policies(add="insert").quantizers
    first, second = (policies(add={"follow": k}).quantizers for k in (0, 1))
    assert torch.equal(first["mul.out"].scale, own["a.out"].scale)
    assert torch.equal(second["a.out"].scale, own["mul.out"].scale)


def test_none_leaves_the_inputs_to_their_other_readers() -> None:
    found = policies(add="none", cat="none").quantizers
    assert [site for site, q in found.items() if q.role is Role.ACTIVATION] == ["input:x", "cat.out"]


def test_policies_name_known_operators_and_inputs() -> None:
    with pytest.raises(ConfigError, match=r"multi_input: ad\b.*is no operator"):
        policies(ad="insert")
    with pytest.raises(ConfigError, match="2 computed inputs"):
        policies(add={"follow": 2})


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ({"node": "layer3.*", "set": {"bits": 4}}, "layer1"),
        ({"op": "Covn", "set": {"bits": 4}}, "Conv"),
        ({"tensor": "fc.weigth", "set": {"bits": 4}}, "fc.weight"),
        ({"between": ["stem", "heed"], "set": {"bits": 4}}, "no node or tensor is called 'heed'"),
        ({"between": ["fc", "stem"], "set": {"bits": 4}}, "no path leads"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_name(rule: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        QuantModel(settled(ResNet()), {"target": "virtual", "rules": [rule]})
    assert hint in str(error.value)


def test_transposed_convolutions_are_refused_for_engines_without_a_kernel() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2))
    for preset in ("ort-int8", "trt-int8"):
        assert [(r.subject, r.rule) for r in QuantModel(model, preset).refusals] == [("0", "no-kernel")]
    assert QuantModel(model, target="virtual").quantizers["0.weight"].spec.granularity.axis == 1


def test_layers_that_cannot_be_traced_have_blocks_of_weights() -> None:
    """As the MatMuls that data of three axes make of them."""
    made = QuantModel(Branching(), {"extends": "ort-int4-weights", "weights": {"block_size": 16}})
    grains = {site: found.spec.granularity for site, found in made.quantizers.items()}
    assert grains == dict.fromkeys(("first.weight", "second.weight", "third.weight"), PerBlock(1, 16))
