"""Checkpoints of the float network load into the quantized one by their own names."""

import copy
import warnings
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from tests.torch.nets import Branching, Encoder, Mobile, Network, ResNet, calibrate, images, settled
from tests.torch.quant_model.kit import W4A4, calibrated, model
from torch_frontend.quant_model import PartialStateWarning


def make_trained(net: Callable[[], nn.Module]) -> nn.Module:
    """A network with other numbers than the one that is converted."""
    torch.manual_seed(7)
    made = settled(net())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.1).add_(0.01)
    return made


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    ("net", "x"),
    [(ResNet, images()), (Mobile, images()), (Encoder, torch.arange(12).reshape(2, 6)), (Branching, torch.ones(2, 16))],
)
def test_a_float_checkpoint_loads_by_its_own_names(net: type[nn.Module], x: torch.Tensor, fold: bool) -> None:
    """Batch norms and all; what the converted model computes in float is what the checkpoint computes."""
    trained = make_trained(net)
    made = model({**W4A4, "torch": {"fuse_bn": fold}}, net)
    assert not torch.allclose(made(x), trained(x), atol=1e-4)
    made.load_state_dict(trained.state_dict())
    torch.testing.assert_close(made(x), trained(x))


def make_outer() -> nn.Module:
    parts = {"model": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 2)}
    return Network(lambda m, x: m.head(m.model(x)), **parts)


def test_a_part_of_the_network_may_be_called_model() -> None:
    trained, made, x = make_trained(make_outer), model(net=make_outer), torch.randn(3, 4)
    made.load_state_dict(trained.state_dict())
    torch.testing.assert_close(made(x), trained(x))
    own = copy.deepcopy(made.state_dict())
    model(net=make_outer).load_state_dict(own)


def test_a_checkpoint_loads_inside_another_module() -> None:
    trained, holder = make_trained(ResNet), nn.Sequential(model())
    holder.load_state_dict({f"0.{name}": value for name, value in trained.state_dict().items()})
    torch.testing.assert_close(holder(images()), trained(images()))


def test_one_name_of_tied_weights_is_enough() -> None:
    trained = make_trained(Encoder)
    state = {name: value for name, value in trained.state_dict().items() if name != "head.weight"}
    made, ids = model(net=Encoder), torch.arange(12).reshape(2, 6)
    made.load_state_dict(state)
    torch.testing.assert_close(made(ids), trained(ids))


def test_whatever_is_not_loaded_is_said() -> None:
    state, made = make_trained(ResNet).state_dict(), model()
    del state["fc.bias"], state["layer1.1.bn2.running_var"]
    state["aux.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"bn2\.running_var") as caught:
        made.load_state_dict(dict(state))
    assert all(name in str(caught.value) for name in ("fc.bias", "aux.weight"))
    with pytest.warns(PartialStateWarning, match=r"lacks .*bn2\.running_var.*fc\.bias.* has no aux\.weight"):
        made.load_state_dict(dict(state), strict=False)
    with pytest.warns(PartialStateWarning, match=r"has no module\.stem\.weight"):
        made.load_state_dict({"module.stem.weight": torch.zeros(1)}, strict=False)


def test_parts_that_the_forward_does_not_use_are_named() -> None:
    def make() -> nn.Module:
        return Network(lambda m, x: m.used(x), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))

    with pytest.warns(PartialStateWarning, match=r"does not read unused\.bias, unused\.weight"):
        model(net=make).load_state_dict(make_trained(make).state_dict())


def test_scales_from_before_are_said_and_kept() -> None:
    made = calibrated()
    before = {site: q.qparams() for site, q in made.quantizers.items() if q.calibrated}
    with pytest.warns(PartialStateWarning, match="scales are from before"):
        made.load_state_dict(make_trained(ResNet).state_dict())
    assert {site: q.qparams() for site, q in made.quantizers.items() if q.calibrated} == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.load_state_dict(copy.deepcopy(made.state_dict()))


def test_after_batchnorm_tuning_a_checkpoint_folds_its_own_statistics() -> None:
    made = model({**W4A4, "weights": {"bits": 4, "granularity": "channel"}, "torch": {"fuse_bn": False}})
    calibrate(made, images())
    with made.batchnorm_tuning():
        made(images())
    trained = make_trained(ResNet)
    with pytest.warns(PartialStateWarning, match="scales are from before"):
        made.load_state_dict(trained.state_dict())
    made.set_quant(False, False)
    torch.testing.assert_close(made(images()), trained(images()))
