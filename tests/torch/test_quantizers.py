"""The contract every quantizer keeps: numbers, switches, state, targets, messages."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnxq import numerics
from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.sites import Role
from onnxq.spec import FLOAT8, ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.quantizers import (
    Quantizer,
    available_quantizers,
    create_quantizer,
    register_quantizer,
)
from torch_frontend.quantizers.registry import _REGISTRY

NAMES = ("adaround", "dorefa", "lsq", "lsq+", "pact", "uniform")
WEIGHTS = ("adaround", "dorefa", "lsq", "lsq+", "uniform")
ACTIVATIONS = ("dorefa", "lsq", "lsq+", "pact", "uniform")
UINT8 = QuantSpec(signed=False, symmetric=False)


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (8, 6, 3, 3)), generator=torch.Generator().manual_seed(seed))


def calibrated(name: str, spec: QuantSpec, seen: torch.Tensor, role: Role = Role.WEIGHT, **how) -> Quantizer:
    made = create_quantizer(name, spec, site="conv.weight", role=role, **how)
    made.observe(seen)
    made.calc_qparams()
    return made


def reference(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numerics.fake_quant(x.detach().numpy(), quantizer.qparams(), quantizer.spec))


def test_names() -> None:
    assert set(NAMES) <= set(available_quantizers())
    with pytest.raises(ConfigError, match=r"did you mean 'lsq'"):
        create_quantizer("lsqq", QuantSpec(), site="a")


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


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_observing_streams_over_batches_and_does_not_quantize_before_numbers(name: str) -> None:
    x = weight(8, 5).abs()
    quantizer = create_quantizer(name, UINT8, site="relu.out")
    quantizer.observing = True
    for batch in x.split(3):
        assert quantizer(batch) is batch
    quantizer.observing = False
    quantizer.calc_qparams()
    whole = calibrated(name, UINT8, x, Role.ACTIVATION)
    assert np.array_equal(quantizer.qparams().scale, whole.qparams().scale)
    quantizer.calc_qparams()  # nothing new seen: nothing changes
    assert np.array_equal(quantizer.qparams().scale, whole.qparams().scale)


def test_every_observer_is_within_reach() -> None:
    x = weight(16, 40).abs()
    scales = {
        name: float(calibrated("uniform", UINT8, x, Role.ACTIVATION, observer=ObserverSpec(name)).scale)
        for name in ("minmax", "moving_average", "percentile", "mse", "entropy", "aciq")
    }
    assert scales["minmax"] == pytest.approx(float(x.max()) / 255)
    assert scales["moving_average"] == pytest.approx(float(x.amax(1).mean()) / 255)
    with pytest.raises(ConfigError, match=r"observer 'minmux'.*\n.*minmax"):
        create_quantizer("uniform", UINT8, site="a", observer=ObserverSpec("minmux"))


def test_activation_per_channel_has_one_observer_each() -> None:
    x = weight(6, 4, 5) * torch.tensor([1.0, 2.0, 4.0, 0.0])[:, None]
    quantizer = calibrated("uniform", QuantSpec(granularity=PerChannel(1)), x, Role.ACTIVATION)
    wanted = x.abs().amax((0, 2)) / 127
    assert torch.allclose(quantizer.scale[:3], wanted[:3])
    assert 0 < quantizer.scale[3] < 1e-6
    with pytest.raises(ConfigError, match="per block"):
        calibrated("uniform", QuantSpec(granularity=PerBlock(1, 2)), x, Role.ACTIVATION)


def test_weight_observer_mse_beats_minmax_at_low_bits() -> None:
    w, spec = weight(), QuantSpec(bits=3, granularity=PerChannel(0))
    errors = {
        name: float((calibrated("uniform", spec, w, observer=ObserverSpec(name))(w) - w).square().sum())
        for name in ("minmax", "mse")
    }
    assert errors["mse"] < 0.8 * errors["minmax"]


def test_given_range() -> None:
    quantizer = create_quantizer("uniform", UINT8, site="relu.out")
    quantizer.calc_qparams_with_minmax(-1.0, torch.tensor(3.0))
    assert quantizer.qparams() == numerics.qparams_from_range(-1.0, 3.0, UINT8, origin="given range")
    low, high = quantizer.dequantized_range()
    assert float(low) == pytest.approx(-1.0, abs=0.01)
    assert float(high) == pytest.approx(3.0, abs=0.01)
    with pytest.raises(CalibrationError, match=r"relu\.out.*not finite"):
        quantizer.calc_qparams_with_minmax(0.0, float("nan"))


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


def test_target_is_an_argument_and_knows_its_limits() -> None:
    for spec in (UINT8, QuantSpec(signed=False), QuantSpec(symmetric=False)):
        with pytest.raises(ConfigError, match=r"relu\.out: trt holds no zero point"):
            create_quantizer("uniform", spec, site="relu.out", target="trt")
        create_quantizer("uniform", spec, site="relu.out", target="ort")
    with pytest.raises(ConfigError, match="unknown"):
        create_quantizer("uniform", UINT8, site="relu.out", target="tensorrt")
    quantizer = create_quantizer("uniform", QuantSpec(), site="relu.out", target="trt")
    with pytest.raises(CalibrationError, match=r"relu\.out: zero point 3, and trt holds only 0"):
        quantizer.load_qparams(QParams(np.float32(0.1), np.int32(3)))
    donor = create_quantizer("uniform", QuantSpec(symmetric=False), site="relu.out")
    donor.calc_qparams_with_minmax(0, 1)
    with pytest.raises(CalibrationError, match="trt holds only 0"):
        quantizer.load_state_dict(donor.state_dict())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (QParams(np.float32(0.0), np.int32(0)), "not a positive number"),
        (QParams(np.float32(np.nan), np.int32(0)), "not a positive number"),
        (QParams(np.float32(1.0), np.int32(1)), "symmetric scheme has 0"),
        (QParams(np.float32([1.0]), np.int32(0)), "same shape|shape"),
    ],
)
def test_impossible_numbers_name_the_site(numbers: QParams, message: str) -> None:
    quantizer = create_quantizer("uniform", QuantSpec(), site="add.out")
    with pytest.raises(CalibrationError, match=rf"add\.out: .*{message}"):
        quantizer.load_qparams(numbers)
    free = create_quantizer("uniform", UINT8, site="add.out")
    with pytest.raises(CalibrationError, match="outside the levels"):
        free.load_qparams(QParams(np.float32(1.0), np.int32(256)))


def test_a_tensor_that_does_not_fit_names_the_site() -> None:
    quantizer = calibrated("uniform", QuantSpec(granularity=PerChannel(0)), weight())
    with pytest.raises(PlanError, match=r"conv\.weight: scales of shape \(8,\).*needs \(4,\)"):
        quantizer(weight(4, 6))
    with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
        calibrated("uniform", QuantSpec(), torch.tensor([1.0, float("nan")]))
    with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
        calibrated("uniform", UINT8, torch.tensor([1.0, float("nan")]), Role.ACTIVATION)
    with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
        calibrated("lsq", UINT8, torch.tensor([1.0, float("nan")]), Role.ACTIVATION)


def test_wrong_wishes() -> None:
    with pytest.raises(ConfigError, match=r"a: .*fake-quantized training"):
        create_quantizer("uniform", QuantSpec(storage=FLOAT8), site="a")
    with pytest.raises(ConfigError, match="weights only"):
        create_quantizer("adaround", QuantSpec(), site="a")
    with pytest.raises(ConfigError, match=r"a: lsq has no option 'int'.*\n.*init"):
        create_quantizer("lsq", QuantSpec(), site="a", options={"int": "paper"})
    with pytest.raises(ConfigError, match="init='papers'"):
        create_quantizer("lsq", QuantSpec(), site="a", options={"init": "papers"})
    with pytest.raises(ConfigError, match="not a float"):
        create_quantizer("pact", UINT8, site="a", options={"alpha": "10"})
    with pytest.raises(ConfigError, match="not positive"):
        create_quantizer("pact", UINT8, site="a", options={"alpha": -1.0})
    with pytest.raises(ConfigError, match="one clipping level"):
        create_quantizer("pact", QuantSpec(granularity=PerChannel(1)), site="a")
    with pytest.raises(ConfigError, match="symmetrically"):
        create_quantizer("lsq+", UINT8, site="a", role=Role.WEIGHT)


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


def test_your_own_quantizer() -> None:
    try:

        @register_quantizer("power-of-two")
        class PowerOfTwo(Quantizer):
            """Scales rounded to powers of two."""

            def numbers_to_slots(self, scale: torch.Tensor, zero_point: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"scale": scale.log2().ceil().exp2(), "zero_point": zero_point}

        assert "power-of-two" in available_quantizers()
        quantizer = calibrated("power-of-two", QuantSpec(bits=4, granularity=PerChannel(0)), weight())
        assert torch.equal(quantizer.scale.log2(), quantizer.scale.log2().round())
        with pytest.raises(ConfigError, match="registered already"):
            register_quantizer("power-of-two")(PowerOfTwo)
        with pytest.raises(TypeError, match="not a subclass"):
            register_quantizer("other")(torch.nn.Linear)
    finally:
        _REGISTRY.pop("power-of-two", None)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("observer", ["minmax", "percentile", "moving_average"])
def test_what_several_processes_saw_adds_up(name: str, observer: str) -> None:
    x = weight(9, 5)
    how = {"site": "relu.out", "observer": ObserverSpec(observer), "options": {}}
    parts = [create_quantizer(name, UINT8, **how) for _ in range(4)]
    for part, batch in zip(parts, x.split(3), strict=False):
        part.observe(batch)  # the fourth sees nothing
    seen = [pickle.loads(pickle.dumps(part.observations())) for part in parts]
    numbers = []
    for part in parts:
        part.merge_observations(seen)
        part.calc_qparams()
        numbers.append(part.qparams())
    assert all(found == numbers[0] for found in numbers)
    whole = create_quantizer(name, UINT8, **how)
    whole.observe(x)
    whole.calc_qparams()
    np.testing.assert_allclose(numbers[0].scale, whole.qparams().scale, rtol=1e-6)
    assert numbers[0].zero_point == whole.qparams().zero_point
