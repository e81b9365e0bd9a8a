"""The contract of every quantizer: qparams, switches, state, messages."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq import numerics
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.torch.quantizers.kit import ACTIVATIONS, NAMES, UINT8, calibrated, weight
from torch_frontend.quantizers import (
    Quantizer,
    create_quantizer,
)

WEIGHTS = ("adaround", "dorefa", "lsq", "lsq+", "uniform")


def reference(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numerics.fake_quant(x.detach().numpy(), quantizer.qparams(), quantizer.spec))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("grain", [PerTensor(), PerChannel(0), PerChannel(-1), PerBlock(1, 4)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_equal_numerics_bit_for_bit(name: str, bits: int, grain: object) -> None:
    w = weight()
    spec = QuantSpec(bits=bits, granularity=grain)
    if name == "dorefa" and bits >= 8:
        with pytest.raises(ConfigError, match="-bit integers"):
            create_quantizer(name, spec, site="conv.weight", role=Role.WEIGHT)
        return
    quantizer = calibrated(name, spec, w)
    shape = {PerTensor: (), PerChannel: (w.shape[getattr(grain, "axis", 0)],), PerBlock: (8, 2, 3, 3)}[type(grain)]
    assert quantizer.qparams().scale.shape == shape
    y = quantizer(w)
    assert torch.equal(y, reference(quantizer, quantizer.bake(w)))
    low, high = quantizer.dequantized_range()
    assert low.shape == shape
    assert y.min() >= low.min()
    assert y.max() <= high.max()


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("scheme", ["asymmetric", "signed asymmetric", "symmetric", "unsigned symmetric"])
@pytest.mark.parametrize("shift", [-0.5, 0.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_numerics_bit_for_bit(name: str, shift: float, scheme: str, bits: int) -> None:
    spec = QuantSpec(bits=bits, signed=scheme in ("symmetric", "signed asymmetric"), symmetric="asym" not in scheme)
    x = weight(4, 5, 7).abs() + shift
    if name == "dorefa" and scheme != "asymmetric":
        with pytest.raises(ConfigError, match=r"lie in \[0, 1\]"):
            create_quantizer(name, spec, site="relu.out")
        return
    if name == "dorefa" and shift:
        with pytest.raises(CalibrationError, match=r"conv\.weight.*values down to -0\.(5|49)"):
            calibrated(name, spec, x, Role.ACTIVATION)
        return
    quantizer = calibrated(name, spec, x, Role.ACTIVATION)
    assert torch.equal(quantizer(x), reference(quantizer, x))
    zero = quantizer.qparams().zero_point
    assert zero.dtype == np.int32
    if spec.symmetric:
        assert zero == (0 if spec.signed else 1 << (bits - 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_keeps_its_type_and_the_numbers_stay_float32(name: str, dtype: torch.dtype) -> None:
    role = Role.ACTIVATION if name == "pact" else Role.WEIGHT
    quantizer = calibrated(name, QuantSpec(bits=4), weight(), role)
    before = quantizer.qparams()
    quantizer.to(dtype)
    assert quantizer.qparams() == before
    y = quantizer(weight().to(dtype))
    assert y.dtype == dtype
    assert y.unique().numel() <= 16


def test_uncalibrated_is_absent_and_harmless() -> None:
    quantizer = create_quantizer("uniform", UINT8, site="relu.out")
    x = weight(3, 4)
    assert quantizer.scale is None
    assert not quantizer.calibrated
    assert quantizer(x) is x
    assert not quantizer.state_dict()
    for ask in (quantizer.qparams, quantizer.dequantized_range):
        with pytest.raises(CalibrationError, match=r"relu\.out: has no scale yet"):
            ask()
    with pytest.raises(CalibrationError, match=r"relu\.out: .*saw no value"):
        quantizer.calc_qparams()


def test_a_pass_switches_off_for_good() -> None:
    w = weight()
    quantizer = calibrated("uniform", QuantSpec(bits=4), w)
    quantizer.enabled = False
    assert quantizer(w) is w
    assert "off" in repr(quantizer)
    quantizer.enabled, quantizer.disabled_reason = True, "its producer is quantized already"
    assert not quantizer.active
    assert quantizer(w) is w
    assert "disabled: its producer is quantized already" in repr(quantizer)


def test_repr_tells_how_and_with_what() -> None:
    quantizer = create_quantizer(
        "lsq", QuantSpec(bits=4, granularity=PerChannel(0)), site="fc.weight", role=Role.WEIGHT
    )
    assert repr(quantizer) == "LSQ('fc.weight', 4 bits symmetric int8 per channel 0, not calibrated)"
    quantizer.load_qparams(QParams(np.float32([0.5, 0.25]), np.int32([0, 0])))
    quantizer.freeze()
    assert repr(quantizer) == (
        "LSQ('fc.weight', 4 bits symmetric int8 per channel 0, scale=0.25…0.5, zero_point=0, frozen)"
    )


@pytest.mark.parametrize("name", NAMES)
def test_state_loads_both_ways(name: str) -> None:
    role = Role.ACTIVATION if name == "pact" else Role.WEIGHT
    spec, w = QuantSpec(bits=4, granularity=PerTensor() if name == "pact" else PerChannel(0)), weight()
    full = calibrated(name, spec, w, role)
    empty = create_quantizer(name, spec, site="conv.weight", role=role)
    blank = empty.state_dict()
    assert not blank
    empty.load_state_dict(full.state_dict())
    assert torch.equal(empty(w), full(w))
    assert [n for n, _ in empty.named_parameters()] == [n for n, _ in full.named_parameters()]
    held = getattr(full, full.slots[0])
    full.load_state_dict({}, strict=False)  # a float model's state says nothing of quantizers
    with pytest.raises(RuntimeError, match="Missing key"):
        full.load_state_dict({})
    assert getattr(full, full.slots[0]) is held
    full.load_state_dict(blank)
    assert not full.calibrated
    half = dict(list(empty.state_dict().items())[:1])
    if len(empty.slots) > 1 and name != "lsq+":
        with pytest.raises(RuntimeError, match="Missing key"):
            full.load_state_dict(half)
    broken = {key: torch.full_like(value, float("nan")) for key, value in empty.state_dict().items()}
    with pytest.raises(CalibrationError, match=r"conv\.weight"):
        full.load_state_dict(broken)


def test_loading_keeps_the_parameter_an_optimizer_holds() -> None:
    one, other = (calibrated("lsq", QuantSpec(bits=4), weight(seed=k)) for k in (1, 2))
    held = one.scale
    one.load_state_dict(other.state_dict())
    one.load_qparams(QParams(np.float32(0.5), np.int32(0)))
    assert one.scale is held
    assert float(held.detach()) == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles(name: str) -> None:
    role = Role.ACTIVATION if name == "pact" else Role.WEIGHT
    full = calibrated(name, QuantSpec(bits=4), weight(), role)
    observing = create_quantizer(name, QuantSpec(bits=4), site="a", role=role)
    observing.observe(weight())
    for again in (copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))):
        twin = again(full)
        assert torch.equal(twin(weight()), full(weight()))
        assert twin.qparams() == full.qparams()
        grown = again(observing)
        grown.calc_qparams()
        assert np.array_equal(grown.qparams().scale, full.qparams().scale)
    assert all(a is not b for a, b in itertools.product(full.buffers(), copy.deepcopy(full).buffers()))


def test_freezing_stops_the_numbers_only() -> None:
    quantizer = calibrated("lsq", QuantSpec(bits=4), weight())
    quantizer.freeze()
    w = weight().requires_grad_()
    quantizer(w).sum().backward()
    assert quantizer.scale.grad is None
    assert w.grad.abs().sum() > 0
    quantizer.freeze(False)
    quantizer(w).sum().backward()
    assert quantizer.scale.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name: str) -> None:
    role = Role.ACTIVATION if name == "pact" else Role.WEIGHT
    quantizer = calibrated(name, QuantSpec(bits=4), weight(), role)
    graph = torch.compile(quantizer, backend="aot_eager", fullgraph=True)
    w, twin = weight().requires_grad_(), weight().requires_grad_()
    graph(w).square().sum().backward()
    quantizer(twin).square().sum().backward()
    assert torch.equal(graph(w), quantizer(w))
    assert torch.equal(w.grad, twin.grad)


@pytest.mark.parametrize("name", ["lsq", "lsq+"])
def test_a_scale_that_training_made_illegal_is_an_error_that_names_the_site(name: str) -> None:
    quantizer, x = calibrated(name, QuantSpec(), weight()), weight()
    with torch.no_grad():
        quantizer.scale.zero_()
    with pytest.raises(ConfigError, match=r"conv\.weight.*scale 0 is not above 0"):
        quantizer(x)
    quantizer.keep_legal()
    assert quantizer(x).isfinite().all()
