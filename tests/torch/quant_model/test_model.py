"""QuantModel: training, compilation, copies, pickles, state dicts and repr."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from onnxq.sites import Role
from tests.torch.nets import Around, Branching, Dense, ResNet, images
from tests.torch.quant_model.kit import W4A4, calibrated, model
from torch_frontend.quant_model import Follower, State


def test_training_moves_weights_and_learned_scales() -> None:
    made = calibrated({**W4A4, "torch": {"weights": {"quantizer": "lsq"}, "activations": {"quantizer": "lsq"}}})
    made.init_qat()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    target, losses = torch.tensor([0, 1, 2, 3]), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(made(images()), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert {"model.stem.weight", "model.stem.weight_quantizer.scale", "model.quantizers.input:x.scale"} <= moved


def test_a_compiled_model_computes_the_same() -> None:
    made, x = calibrated().set_quant().eval(), images()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), made(x), rtol=1e-5, atol=1e-5)


NETS = {"resnet": (ResNet, images()), "dense": (Dense, images()), "around": (Around, torch.ones(3, 16)),
        "branching": (Branching, torch.ones(3, 16))}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("target", ["ort", "virtual"])
def test_copies_pickles_and_state_dicts_compute_the_same(name: str, target: str) -> None:
    net, x = NETS[name]
    config = {"target": target, "torch": {"weights": {"quantizer": "lsq"}}}
    made = model(config, net).prepare_calibration()
    made(x)
    made.calc_qparams().set_quant()
    site = next(s for s, q in made.quantizers.items() if q.role is Role.WEIGHT)
    made.disable(site)
    expected = made(x)
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    loaded = model(config, net)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), loaded):
        assert torch.equal(other(x), expected)
        assert other.state is State.QUANTIZED
        assert other.quantizers.keys() == made.quantizers.keys()
        assert not other.quantizers[site].active
        inside = list(other.quantizers.values())
        assert all(any(q.leader is one for one in inside) for q in inside if isinstance(q, Follower))
        other.set_quant(False, False)
    assert torch.equal(made(x), expected)


def test_a_pickle_can_be_calibrated_again() -> None:
    made = pickle.loads(pickle.dumps(model())).prepare_calibration()
    made(images())
    made.calc_qparams(asym=True).set_quant()
    again = calibrated().set_quant()
    assert made.quantization_error(images()).keys() == again.quantization_error(images()).keys()


def test_the_repr_shows_bits_scheme_and_numbers_when_on() -> None:
    made = calibrated().set_quant()
    text = repr(made.quantizers["input:x"])
    for word in ("4 bits", "asymmetric", "scale=", "zero_point="):
        assert word in text
    assert "scale=" not in repr(model().quantizers["input:x"])
