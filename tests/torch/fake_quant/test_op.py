"""fake_quantize among torch's own machinery: opcheck, compile, autocast, empty tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.fake_quant.kit import make_qparams, make_x
from torch_frontend.fake_quant import fake_quantize

# Dynamo and inductor warn about their own parts.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


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
    explained = torch._dynamo.explain(block)(x)
    assert explained.graph_break_count == 0
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
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
    assert scale.grad is not None
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
    assert scale.grad is not None
    assert scale.grad.shape == (1,)
    assert float(scale.grad) == pytest.approx(0.4)


def test_second_derivatives_are_refused() -> None:
    x = make_x(5).requires_grad_()
    y = fake_quantize(x, *make_qparams(()), qmin=-8, qmax=7)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
