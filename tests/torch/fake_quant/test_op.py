"""fake_quantize among torch's own machinery: opcheck, compile, vmap, autocast, empty tensors, and wrong calls."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import ConfigError
from torch_frontend.fake_quant import fake_quantize, op
from torch_frontend.fake_quant.kernels import ReferenceKernels

# Dynamo and inductor warn about their own parts.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def make_qparams(shape: tuple[int, ...]) -> tuple[Any, Any]:
    rng = torch.Generator().manual_seed(3)
    return torch.rand(shape, generator=rng) * 0.1 + 0.05, torch.rand(shape, generator=rng)


def make_x(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


@quiet
@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "block", "needed"),
    [
        (torch.float32, (), None, 0, (True, False, False)),
        (torch.bfloat16, (4,), 1, 0, (False, True, True)),
        (torch.float64, (3, 2, 5), 1, 2, (True, True, True)),
    ],
)
def test_opcheck(
    dtype: Any, shape: tuple[int, ...], axis: int | None, block: int, needed: tuple[bool, bool, bool]
) -> None:
    x = make_x(3, 4, 5).to(dtype).requires_grad_()
    scale, zero = (t.requires_grad_() for t in make_qparams(shape))
    settings = (-8, 7, axis, block, 0.5, 2.0, "clip")
    torch.library.opcheck(torch.ops.onnxq.fake_quantize.default, (x, scale, zero, *settings))
    plain = [t.detach() for t in (x, x, scale, zero)]
    torch.library.opcheck(torch.ops.onnxq.fake_quantize_backward.default, (*plain, *needed, *settings))


@quiet
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "empty"])
def test_opcheck_of_other_strides(layout: str) -> None:
    x = {
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "sliced": lambda t: t[:, :, ::2],
        "empty": lambda t: t[:, :, :, :0],
    }[layout](make_x(2, 4, 3, 5))
    leaves = [t.detach().requires_grad_() for t in (x, *make_qparams((4,)))]
    torch.library.opcheck(torch.ops.onnxq.fake_quantize.default, (*leaves, -8, 7, 1))


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.scale = torch.nn.Parameter(torch.full((4,), 0.05))
        self.activation_scale = torch.nn.Parameter(torch.tensor(0.1))
        self.register_buffer("zero", torch.zeros(4))
        self.zero_point = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Any) -> Any:
        x = fake_quantize(x, self.activation_scale, self.zero_point, qmin=0, qmax=15, grad_scale=0.1, edge="clip")
        weight = fake_quantize(self.conv.weight, self.scale, self.zero, qmin=-8, qmax=7, axis=0, grad_scale=0.1)
        return torch.relu(torch.nn.functional.conv2d(x, weight, self.conv.bias))


@quiet
def test_compiles_as_one_graph_with_equal_gradients() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    block, x = _Block(), make_x(2, 3, 8, 8)
    assert torch._dynamo.explain(block)(x).graph_break_count == 0
    results = []
    for call in (block, torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")):
        block.zero_grad()
        y = call(x)
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in block.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    other = make_x(3, 3, 9, 7)
    torch.testing.assert_close(call(other), block(other))


# Else inductor compiles probes of the processor's vectors first, and torch's headers, which is most of its time.
QUICK = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}


@pytest.mark.slow
@quiet
def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    x = make_x(2, 6, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    scale, zero = (t.requires_grad_() for t in make_qparams((6,)))

    def step(x: Any) -> Any:
        return fake_quantize(x * 2, scale, zero, qmin=-8, qmax=7, axis=1)

    with torch._inductor.config.patch(QUICK):
        plain, compiled = (
            torch.autograd.grad(run(x).square().sum(), (x, scale, zero))
            for run in (step, torch.compile(step, fullgraph=True))
        )
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_dtypes(dtype: Any) -> None:
    linear = torch.nn.Linear(8, 4)
    scale, zero = (t.requires_grad_() for t in make_qparams(()))
    with torch.autocast("cpu", dtype):
        y = fake_quantize(linear(make_x(5, 8)), scale, zero, qmin=-8, qmax=7)
        weight = fake_quantize(linear.weight, scale, zero, qmin=-8, qmax=7)
        out = torch.nn.functional.linear(make_x(5, 8), weight)
    assert (y.dtype, weight.dtype, out.dtype) == (dtype, torch.float32, dtype)
    (y.float().sum() + out.float().sum()).backward()
    assert linear.weight.grad.dtype == torch.float32
    assert scale.grad.dtype == torch.float32


@pytest.mark.parametrize(("shape", "axis"), [((0,), None), ((3, 0), 1), ((2, 3, 0), 1), ((0,), 0)])
def test_empty_tensors_have_empty_results_and_no_gradient(shape: tuple[int, ...], axis: int | None) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    scale, zero = (t.requires_grad_() for t in make_qparams(() if axis is None else (shape[axis],)))
    y = fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=axis)
    y.sum().backward()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    for leaf in (x, scale, zero):
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


def test_scalars_and_single_values() -> None:
    x = torch.tensor(0.3, requires_grad=True)
    scale, zero = torch.tensor([0.5], requires_grad=True), torch.tensor([0.0])
    y = fake_quantize(x, scale, zero, qmin=-8, qmax=7)
    y.backward()
    assert float(y.detach()) == 0.5
    assert scale.grad.shape == (1,)
    assert float(scale.grad) == pytest.approx(0.4)


def test_second_derivatives_are_refused() -> None:
    x = make_x(5).requires_grad_()
    y = fake_quantize(x, *make_qparams(()), qmin=-8, qmax=7)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(("shape", "axis", "block"), [((), None, 0), ((4,), 0, 0), ((5,), -1, 0), ((4, 3), 1, 2)])
def test_vmap_is_a_loop(shape: tuple[int, ...], axis: int | None, block: int) -> None:
    scale, zero = make_qparams((3, *shape))
    x = make_x(3, 4, 5)

    def call(x: Any, scale: Any, zero: Any) -> Any:
        return fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=axis, block_size=block)

    looped = torch.stack([call(*one) for one in zip(x, scale, zero, strict=True)])
    assert torch.equal(torch.vmap(call)(x, scale, zero), looped)
    shared = torch.stack([call(one, scale[0], zero[0]) for one in x])
    assert torch.equal(torch.vmap(call, in_dims=(0, None, None))(x, scale[0], zero[0]), shared)
    last = torch.vmap(call, in_dims=(2, 0, 0))(x.movedim(0, 2), scale, zero)
    assert torch.equal(last, looped)


@pytest.mark.parametrize(("shape", "axis", "block"), [((), None, 0), ((5,), 1, 0), ((4, 3), 1, 2)])
def test_batched_gradients_are_a_loop(shape: tuple[int, ...], axis: int | None, block: int) -> None:
    x = make_x(4, 5).requires_grad_()
    leaves = [x, *(t.requires_grad_() for t in make_qparams(shape))]
    y = fake_quantize(*leaves, qmin=-8, qmax=7, axis=axis, block_size=block)
    dy = make_x(3, 4, 5)
    batched = torch.autograd.grad(y, leaves, dy, retain_graph=True, is_grads_batched=True)
    for k in range(3):
        for one, other in zip(torch.autograd.grad(y, leaves, dy[k], retain_graph=True), batched, strict=True):
            torch.testing.assert_close(one, other[k])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, dtype=torch.int32)}, r"x is torch\.int32"),
        ({"scale": torch.zeros(4, dtype=torch.int8)}, r"scale is torch\.int8"),
        ({"axis": 0}, r"scales of shape \(4,\) where a tensor of shape \(3, 4\) needs \(3,\)"),
        ({"axis": None}, "4 scales for a tensor quantized as a whole"),
        ({"axis": 2}, r"axis 2 is outside a tensor of shape \(3, 4\)"),
        ({"axis": -3}, "axis -3"),
        ({"zero_point": torch.zeros(3)}, r"zero_point \(3,\)"),
        ({"qmin": 7}, "qmin 7, qmax 7"),
        ({"qmax": 1 << 20}, "qmax 1048576"),
        ({"block_size": -1}, "block_size -1"),
        ({"block_size": 2}, r"needs \(3, 2\)"),
        ({"block_size": 2, "axis": None}, "block_size 2"),
        ({"edge": "floor"}, "edge 'floor'"),
        ({"scale": torch.zeros(4, device="meta")}, "scale on meta"),
        ({"scale": torch.tensor([1.0, 0.0, 1.0, 1.0])}, "scale 0 is not above 0"),
        ({"scale": torch.tensor([1.0, 1.0, 1.0, -0.5])}, r"scale -0\.5 is not above 0"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"x": make_x(3, 4), "scale": torch.ones(4), "zero_point": torch.zeros(4)}
    call |= {"qmin": -8, "qmax": 7, "axis": 1, **change}
    with pytest.raises(ConfigError, match=message):
        fake_quantize(call.pop("x"), call.pop("scale"), call.pop("zero_point"), **call)


def test_a_scale_not_above_zero_is_an_error_without_compiled_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "choose_kernels", lambda _: ReferenceKernels("asked for"))
    for scale in (0.0, -1.0):
        with pytest.raises(ConfigError, match="is not above 0"):
            fake_quantize(make_x(3), torch.tensor(scale), torch.tensor(0.0), qmin=-8, qmax=7)
    nan = fake_quantize(make_x(3), torch.tensor(float("nan")), torch.tensor(0.0), qmin=-8, qmax=7)
    assert nan.isnan().all()
