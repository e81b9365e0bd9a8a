"""The contract of every quantizer: names, qparams, switches, state, upkeep, limits, messages."""

import copy
import itertools
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq import numerics
from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.sites import Role
from onnxq.spec import FLOAT8, PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.torch.quantizers import kit
from tests.torch.quantizers.kit import quantizer
from torch_frontend.quantizers import PostStep, Quantizer, create_quantizer, penalty, register_quantizer
from torch_frontend.quantizers.registry import _REGISTRY

WEIGHTS = ("adaround", "dorefa", "lsq", "lsq+", "uniform")


def reference(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numerics.fake_quant(x.detach().numpy(), quantizer.qparams(), quantizer.spec))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("grain", [PerTensor(), PerChannel(0), PerChannel(-1), PerBlock(1, 4)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_equal_numerics_bit_for_bit(name: str, bits: int, grain: object) -> None:
    w = kit.weight()
    spec = QuantSpec(bits=bits, granularity=grain)
    if name == "dorefa" and bits >= 8:
        with pytest.raises(ConfigError, match="-bit integers"):
            create_quantizer(name, spec, site="conv.weight", role=Role.WEIGHT)
        return
    quantizer = kit.calibrated(name, spec, w)
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
@pytest.mark.parametrize("name", kit.ACTIVATIONS)
def test_activations_equal_numerics_bit_for_bit(name: str, shift: float, scheme: str, bits: int) -> None:
    spec = QuantSpec(bits=bits, signed=scheme in ("symmetric", "signed asymmetric"), symmetric="asym" not in scheme)
    x = kit.weight(4, 5, 7).abs() + shift
    if name == "dorefa" and scheme != "asymmetric":
        with pytest.raises(ConfigError, match=r"lie in \[0, 1\]"):
            create_quantizer(name, spec, site="relu.out")
        return
    if name == "dorefa" and shift:
        with pytest.raises(CalibrationError, match=r"conv\.weight.*values down to -0\.(5|49)"):
            kit.calibrated(name, spec, x, role=Role.ACTIVATION)
        return
    quantizer = kit.calibrated(name, spec, x, role=Role.ACTIVATION)
    assert torch.equal(quantizer(x), reference(quantizer, x))
    zero = quantizer.qparams().zero_point
    assert zero.dtype == np.int32
    if spec.symmetric:
        assert zero == (0 if spec.signed else 1 << (bits - 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", kit.NAMES)
def test_half_keeps_its_type_and_the_numbers_stay_float32(name: str, dtype: torch.dtype) -> None:
    quantizer = kit.four_bits(name)
    before = quantizer.qparams()
    quantizer.to(dtype)
    assert quantizer.qparams() == before
    y = quantizer(kit.weight().to(dtype))
    assert y.dtype == dtype
    assert y.unique().numel() <= 16


def test_uncalibrated_is_absent_and_harmless() -> None:
    quantizer = create_quantizer("uniform", kit.UINT8, site="relu.out")
    x = kit.weight(3, 4)
    assert quantizer.scale is None
    assert not quantizer.calibrated
    assert quantizer(x) is x
    assert not quantizer.state_dict()
    for ask in (quantizer.qparams, quantizer.dequantized_range):
        with pytest.raises(CalibrationError, match=r"relu\.out: has no scale yet.*\[Q508\]"):
            ask()
    with pytest.raises(CalibrationError, match=r"relu\.out: .*saw no value"):
        quantizer.calc_qparams()


def test_repr_tells_how_and_with_what() -> None:
    spec, begun = QuantSpec(bits=4, granularity=PerChannel(0)), "LSQ('fc.weight', 4 bits symmetric int8 per channel 0, "
    quantizer = create_quantizer("lsq", spec, site="fc.weight", role=Role.WEIGHT)
    assert repr(quantizer) == f"{begun}not calibrated)"
    quantizer.load_qparams(QParams(np.float32([0.5, 0.25]), np.int32([0, 0])))
    quantizer.freeze()
    assert repr(quantizer) == f"{begun}scale=0.25…0.5, zero_point=0, frozen)"
    quantizer.enabled = False
    assert "off" in repr(quantizer)


@pytest.mark.parametrize("name", kit.NAMES)
def test_state_loads_both_ways(name: str) -> None:
    role = kit.role_of(name)
    spec, w = QuantSpec(bits=4, granularity=PerTensor() if name == "pact" else PerChannel(0)), kit.weight()
    full = kit.calibrated(name, spec, w, role=role)
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
    one, other = (kit.four_bits("lsq", seed=k) for k in (1, 2))
    held = one.scale
    one.load_state_dict(other.state_dict())
    one.load_qparams(QParams(np.float32(0.5), np.int32(0)))
    assert one.scale is held
    assert float(held.detach()) == 0.5


@pytest.mark.parametrize("name", kit.NAMES)
def test_copies_and_pickles(name: str) -> None:
    full = kit.four_bits(name)
    observing = create_quantizer(name, QuantSpec(bits=4), site="a", role=full.role)
    observing.observe(kit.weight())
    for again in (copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))):
        twin = again(full)
        assert torch.equal(twin(kit.weight()), full(kit.weight()))
        assert twin.qparams() == full.qparams()
        grown = again(observing)
        grown.calc_qparams()
        assert np.array_equal(grown.qparams().scale, full.qparams().scale)
    assert all(a is not b for a, b in itertools.product(full.buffers(), copy.deepcopy(full).buffers()))


def test_other_bits_take_the_scales_away() -> None:
    quantizer = kit.four_bits("lsq")
    quantizer.observe(kit.weight())
    quantizer.set_bit(8)
    with pytest.raises(CalibrationError, match="has no scale yet"):
        quantizer.qparams()
    assert quantizer.observations() is None


def test_freezing_stops_the_numbers_only() -> None:
    quantizer = kit.four_bits("lsq")
    quantizer.freeze()
    w = kit.weight().requires_grad_()
    quantizer(w).sum().backward()
    assert quantizer.scale.grad is None
    assert w.grad.abs().sum() > 0
    quantizer.freeze(False)
    quantizer(w).sum().backward()
    assert quantizer.scale.grad is not None


@pytest.mark.parametrize("name", kit.NAMES)
def test_compiles_without_a_graph_break(name: str) -> None:
    quantizer = kit.four_bits(name)
    graph = torch.compile(quantizer, backend="aot_eager", fullgraph=True)
    w, twin = kit.weight().requires_grad_(), kit.weight().requires_grad_()
    graph(w).square().sum().backward()
    quantizer(twin).square().sum().backward()
    assert torch.equal(graph(w), quantizer(w))
    assert torch.equal(w.grad, twin.grad)


@pytest.mark.parametrize("name", ["lsq", "lsq+"])
def test_a_scale_that_training_made_illegal_is_an_error_that_names_the_site(name: str) -> None:
    quantizer, x = kit.calibrated(name, QuantSpec(), kit.weight()), kit.weight()
    with torch.no_grad():
        quantizer.scale.zero_()
    with pytest.raises(ConfigError, match=r"conv\.weight.*scale 0 is not above 0"):
        quantizer(x)
    quantizer.keep_legal()
    assert quantizer(x).isfinite().all()


def test_your_own_quantizer() -> None:
    try:

        @register_quantizer("power-of-two")
        class PowerOfTwo(Quantizer):
            """Scales rounded to powers of two."""

            def make_slots(self, scale: torch.Tensor, zero_point: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"scale": scale.log2().ceil().exp2(), "zero_point": zero_point}

        assert "power-of-two" in _REGISTRY
        quantizer = kit.calibrated("power-of-two", QuantSpec(bits=4, granularity=PerChannel(0)), kit.weight())
        assert torch.equal(quantizer.scale.log2(), quantizer.scale.log2().round())
        with pytest.raises(ConfigError, match="registered already"):
            register_quantizer("power-of-two")(PowerOfTwo)
        with pytest.raises(TypeError, match="not a subclass"):
            register_quantizer("other")(torch.nn.Linear)
    finally:
        _REGISTRY.pop("power-of-two", None)


@pytest.mark.parametrize("name", ["lsq", "lsq+", "pact"])
def test_scales_stay_positive_whatever_the_optimizer_does_and_nan_names_its_site(name: str) -> None:
    net = torch.nn.ModuleDict(
        {k: quantizer(name, kit.unsigned(4), 0.1, role=Role.ACTIVATION).float() for k in ("a", "b")}
    )
    net["b"].site = "layer1.relu.out"
    optimizer, upkeep = torch.optim.SGD(net.parameters(), lr=1e6), PostStep(net)
    handle = upkeep.attach(optimizer)
    net["a"](torch.full((2, 3), 50.0)).sum().backward()
    optimizer.step()
    assert np.all(net["a"].qparams().scale > 0)
    assert bool(net["a"](torch.ones(2, 3)).isfinite().all())
    handle.remove()
    next(net["b"].parameters()).data.fill_(float("nan"))
    with pytest.raises(CalibrationError, match=r"(?s)layer1\.relu\.out: .*no longer a finite number.*learning rate"):
        upkeep()
    with pytest.raises(CalibrationError, match=r"layer1\.relu\.out"):
        net["b"].qparams()


def test_nothing_to_keep_up_is_fine() -> None:
    net = torch.nn.ModuleDict({"a": create_quantizer("lsq", QuantSpec(), site="s")})
    PostStep(net)()
    assert penalty(net) == 0.0


def test_target_is_an_argument_and_knows_its_limits() -> None:
    for spec in (kit.UINT8, QuantSpec(signed=False), QuantSpec(symmetric=False)):
        with pytest.raises(ConfigError, match=r"relu\.out: trt holds no zero point"):
            create_quantizer("uniform", spec, site="relu.out", target="trt")
        create_quantizer("uniform", spec, site="relu.out", target="ort")
    with pytest.raises(ConfigError, match="there is none of this name"):
        create_quantizer("uniform", kit.UINT8, site="relu.out", target="tensorrt")
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
    with pytest.raises(CalibrationError, match=rf"add\.out: .*({message}).*\[Q509\]"):
        quantizer.load_qparams(numbers)
    free = create_quantizer("uniform", kit.UINT8, site="add.out")
    with pytest.raises(CalibrationError, match="outside the range"):
        free.load_qparams(QParams(np.float32(1.0), np.int32(256)))


@pytest.mark.parametrize(
    ("name", "spec", "more", "message"),
    [
        ("lsqq", QuantSpec(), {}, "did you mean 'lsq'"),
        ("uniform", QuantSpec(storage=FLOAT8), {}, "a: .*fake-quantized training"),
        ("adaround", QuantSpec(), {}, r"weights only.*\[Q316\]"),
        ("lsq", QuantSpec(), {"options": {"int": "paper"}}, r"a: lsq has no option 'int'.*\n.*init"),
        ("lsq", QuantSpec(), {"options": {"init": "papers"}}, "init='papers'"),
        ("pact", kit.UINT8, {"options": {"alpha": "10"}}, "not a float"),
        ("pact", kit.UINT8, {"options": {"alpha": -1.0}}, "not positive"),
        ("pact", QuantSpec(granularity=PerChannel(1)), {}, "one clipping level"),
        ("lsq+", kit.UINT8, {"role": Role.WEIGHT}, "symmetrically"),
    ],
)
def test_wrong_wishes(name: str, spec: QuantSpec, more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_quantizer(name, spec, site="a", **more)


def test_a_tensor_that_does_not_fit_names_the_site() -> None:
    fitted = kit.calibrated("uniform", QuantSpec(granularity=PerChannel(0)), kit.weight())
    with pytest.raises(PlanError, match=r"conv\.weight: scales of shape \(8,\).*needs \(4,\)"):
        fitted(kit.weight(4, 6))
    for name, spec, role in (
        ("uniform", QuantSpec(), Role.WEIGHT),
        ("uniform", kit.UINT8, Role.ACTIVATION),
        ("lsq", kit.UINT8, Role.ACTIVATION),
    ):
        with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
            kit.calibrated(name, spec, torch.tensor([1.0, float("nan")]), role=role)
