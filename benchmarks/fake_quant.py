"""Fake quantization beside everything torch offers for it, in one run: milliseconds, and times a copy of the bytes.

    python benchmarks/fake_quant.py [--device cpu|cuda] [--dtype float32] [--threads 2] [--rounds 30] [--small]

Every contender runs once per round, in turns, and its least time counts. Forward reads x and writes y: the limit is a
copy. Backward reads x and dy and writes dx: the limit is an addition of two tensors into a third.
"kernels" write into memory that is already there, as the limits do; every other row makes its outputs anew, which on
a CPU costs page faults besides: `copy, new output` is that row's limit.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import measure
from torch_frontend.fake_quant import available, fake_quantize
from torch_frontend.fake_quant.calls import CompiledKernels, prepare_backward, prepare_forward
from torch_frontend.fake_quant.grid import Grid
from torch_frontend.fake_quant.kernels import kernels_for
from torch_frontend.fake_quant.reference import backward, forward

QMIN, QMAX = -8, 7
_OURS = "onnxq, learned scale and zero point"
# Rounds after which the slowest rows, whose place is clear by then, are left out.
_FEW = 8


@dataclass(frozen=True)
class Case:
    """A tensor and the axis its scales lie on."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    channels_last: bool = False


CASES = (
    Case("activation 64x64x56x56, per tensor", (64, 64, 56, 56), None),
    Case("activation 64x64x56x56, axis 1", (64, 64, 56, 56), 1),
    Case("activation 64x64x56x56 channels_last, axis 1", (64, 64, 56, 56), 1, True),
    Case("tokens 64x196x768, axis 2", (64, 196, 768), 2),
    Case("weight 512x512x3x3, axis 0", (512, 512, 3, 3), 0),
    Case("weight 4096x4096, axis 0", (4096, 4096), 0),
)
SMALL = (
    Case("activation 8x64x28x28, per tensor", (8, 64, 28, 28), None),
    Case("weight 64x64x3x3, axis 0", (64, 64, 3, 3), 0),
)


@dataclass(frozen=True)
class Tensors:
    """One case's data: x, scale and zero point as leaves that require gradients, and a gradient of y."""

    x: Tensor
    scale: Tensor
    zero: Tensor
    dy: Tensor
    axis: int | None

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """What gradients are taken of."""
        return self.x, self.scale, self.zero


Forward = Callable[[Tensors], Tensor]


def _made(case: Case, dtype: torch.dtype, device: str) -> Tensors:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, generator=rng)
    dy = torch.randn(case.shape, generator=rng)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    x, dy = (t.to(device, dtype).contiguous(memory_format=layout) for t in (x, dy))
    shape = () if case.axis is None else (case.shape[case.axis],)
    scale = (torch.rand(shape, generator=rng) * 0.1 + 0.3).to(device)
    zero = torch.zeros(shape, device=device)
    return Tensors(x.requires_grad_(), scale.requires_grad_(), zero.requires_grad_(), dy, case.axis)


def _spread(values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    return values if axis is None else values.reshape([-1 if k == axis else 1 for k in range(x.dim())])


def _through(rounded: Tensor, value: Tensor) -> Tensor:
    return value + (rounded - value).detach()


def _composed(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    """What people write: straight-through by detach."""
    steps, shift = _spread(scale, x, axis), _spread(_through(zero.round(), zero), x, axis)
    ratio = x.float() / steps
    return (((_through(ratio.round(), ratio) + shift).clamp(QMIN, QMAX) - shift) * steps).to(x.dtype)


class _ByHand(torch.autograd.Function):
    """The same with its gradient written out: saves less than autograd would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
        ctx.save_for_backward(x, scale, zero)
        ctx.grid = Grid(QMIN, QMAX, axis)
        return forward(x, scale, zero, ctx.grid)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (*backward(dy, *ctx.saved_tensors, ctx.grid), None)


def _by_hand(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    y: Tensor = _ByHand.apply(x, scale, zero, axis)
    return y


def _ours(t: Tensors) -> Tensor:
    return fake_quantize(t.x, t.scale, t.zero, qmin=QMIN, qmax=QMAX, axis=t.axis)


def _ours_fixed(t: Tensors) -> Tensor:
    return fake_quantize(t.x, t.scale.detach(), t.zero.detach(), qmin=QMIN, qmax=QMAX, axis=t.axis)


def _torch_fixed(t: Tensors) -> Tensor:
    scale, zero = t.scale.detach(), t.zero.detach().int()
    if t.axis is None:
        return torch.fake_quantize_per_tensor_affine(t.x, scale, zero, QMIN, QMAX)
    return torch.fake_quantize_per_channel_affine(t.x, scale, zero, t.axis, QMIN, QMAX)


def _torch_learned(t: Tensors) -> Tensor:
    if t.axis is None:
        y: Tensor = torch._fake_quantize_learnable_per_tensor_affine(
            t.x, t.scale.reshape(1), t.zero.reshape(1), QMIN, QMAX, 1.0
        )
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(t.x, t.scale, t.zero, t.axis, QMIN, QMAX, 1.0)
    return y


def _contenders() -> dict[str, Forward]:
    compiled = torch.compile(_composed, dynamic=False)
    compiled_by_hand = torch.compile(_by_hand, dynamic=False)
    return {
        "onnxq, fixed scale": _ours_fixed,
        "torch.fake_quantize_*": _torch_fixed,
        _OURS: _ours,
        "torch._fake_quantize_learnable_*": _torch_learned,
        "composed, autograd": lambda t: _composed(*t.leaves, t.axis),
        "composed, gradient by hand": lambda t: _by_hand(*t.leaves, t.axis),
        "torch.compile, autograd": lambda t: compiled(*t.leaves, t.axis),
        "torch.compile, gradient by hand": lambda t: compiled_by_hand(*t.leaves, t.axis),
    }


class _Clock:
    """Milliseconds of one call; on CUDA between events, so that launches overlap as they do in training."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def __call__(self, work: Callable[[], Any]) -> tuple[float, Any]:
        if self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            result = work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end), result
        begin = time.perf_counter()
        result = work()
        return (time.perf_counter() - begin) * 1e3, result


def _limits(t: Tensors) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Rows that are no operators: the limits, with and without new outputs, and the kernels alone."""
    x, dy, scale, zero = t.x.detach(), t.dy, t.scale.detach(), t.zero.detach()
    y = torch.empty_like(x).copy_(x)
    rows: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "limit: copy, add into a third": (lambda: y.copy_(x), lambda: torch.add(x, dy, out=y)),
        "copy, add, new output": (lambda: x.clone(), lambda: x + dy),
    }
    kernels, grid = kernels_for(x), Grid(QMIN, QMAX, t.axis)
    if isinstance(kernels, CompiledKernels):
        there = prepare_forward(x, scale, zero, grid)
        back = prepare_backward(dy, x, scale, zero, grid, (True, True, True))
        only_x = prepare_backward(dy, x, scale, zero, grid, (True, False, False))
        rows["onnxq kernels, dx alone"] = partial(kernels.run_forward, there), partial(kernels.run_backward, only_x)
        rows["onnxq kernels"] = partial(kernels.run_forward, there), partial(kernels.run_backward, back)
    return rows


def _measure(t: Tensors, contenders: dict[str, Forward], rounds: int, clock: _Clock) -> dict[str, list[float]]:
    """Least forward and backward milliseconds per row; rows that fail once are left out."""
    limits = _limits(t)
    least = {name: [float("inf")] * 2 for name in (*limits, *contenders)}

    def one(name: str) -> tuple[float, float]:
        if name in limits:
            return clock(limits[name][0])[0], clock(limits[name][1])[0]
        wanted = t.leaves[:1] if "fixed" in name or name == "torch.fake_quantize_*" else t.leaves
        first, y = clock(lambda: contenders[name](t))
        second, _ = clock(partial(torch.autograd.grad, y, wanted, t.dy))
        return first, second

    for number in range(rounds + 2):
        for name in list(least):
            if number > _FEW and sum(least[name]) > 8 * sum(least[_OURS]):
                continue
            try:
                spent = one(name)
            except (RuntimeError, NotImplementedError) as error:
                print(f"  {name} left out: {str(error).splitlines()[0][:100]}")
                del least[name]
                continue
            if number >= 2:  # the first ones compile
                least[name] = [min(a, b) for a, b in zip(least[name], spent, strict=True)]
    return least


def _shown(least: dict[str, list[float]], t: Tensors, device: str) -> str:
    size = t.x.numel() * t.x.element_size()
    limit = least["limit: copy, add into a third"]
    ours = least[_OURS]
    head = ["", "forward ms", "× limit", "backward ms", "× limit", "both ms", "÷ onnxq"]
    if device == "cuda":
        head += ["forward % of copy", "backward % of copy"]
    rows = []
    for name, (first, second) in least.items():
        against = least["onnxq, fixed scale"] if "fake_quantize_*" in name and "learn" not in name else ours
        row = [name, f"{first:.3f}", f"{first / limit[0]:.2f}", f"{second:.3f}", f"{second / limit[1]:.2f}"]
        row += [f"{first + second:.3f}", f"{(first + second) / sum(against):.2f}"]
        if device == "cuda":
            copied = 2 * size / limit[0]
            row += [f"{2 * size / first / copied:.0%}", f"{3 * size / second / copied:.0%}"]
        rows.append(row)
    return measure.table(rows, head)


def main() -> None:
    """Measure every case and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="small tensors: what a call costs besides its bytes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(
        f"torch {torch.__version__}, {where}, {options.threads} threads, {options.dtype}, {options.rounds} rounds,",
        end=" ",
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    clock, contenders = _Clock(options.device), _contenders()
    for case in SMALL if options.small else CASES:
        if options.only not in case.name:
            continue
        torch._dynamo.reset()
        t = _made(case, getattr(torch, options.dtype), options.device)
        print(f"\n## {case.name}\n")
        print(_shown(_measure(t, contenders, options.rounds, clock), t, options.device))
    print("\n" + ", ".join(f"{device}: {state}" for device, state in available().items()))


if __name__ == "__main__":
    main()
