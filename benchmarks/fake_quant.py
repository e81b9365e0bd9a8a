"""Fake quantization beside everything torch offers for it, in one run: milliseconds, and times a copy of the bytes.

    python benchmarks/fake_quant.py [--device cpu|cuda] [--dtype float32] [--threads 2] [--rounds 30] [--small]

Every contender runs once per round, in turns, after a run that is not timed and an emptied heap, so that none meets
pages that another left behind; its least time counts. Forward reads x and writes y: the limit is a copy. Backward reads
x and dy and writes dx: the limit is an addition of two tensors into a third. A tensor that the last cache may hold is
marked: its rows say nothing about memory.
"kernels" write into memory that is already there, the same as the limits; every other row makes its outputs anew, which
on a CPU costs page faults besides: `copy, new output` is that row's limit.
Rows with a fixed scale take the gradient of x alone and are compared with each other, those with learned ones too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import measure
from torch_frontend.fake_quant import available, fake_quantize
from torch_frontend.fake_quant.calls import CompiledKernels, prepare_backward, prepare_forward
from torch_frontend.fake_quant.grid import Grid
from torch_frontend.fake_quant.kernels import choose_kernels
from torch_frontend.fake_quant.reference import compute_backward, compute_forward

QMIN, QMAX = -8, 7
_OURS = {False: "onnxq, fixed scale", True: "onnxq, learned scale and zero point"}
_LIMIT = "limit: copy, add into a third"
_KERNELS = "onnxq kernels"
SUMMARY = (
    "tensor (*: may lie in the cache)", "forward × copy", "dx alone × add", "backward × add",
    "fixed scale, ms", "next", "learned, ms", "next",
)  # fmt: skip
# Cycles of the GPU, some milliseconds: longer than the host takes to queue the slowest call.
_AHEAD = 8_000_000
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
    Case("weight 2048x1024x3x3, axis 0", (2048, 1024, 3, 3), 0),
    Case("weight 4096x4096, axis 0", (4096, 4096), 0),
    Case("weight 4096x4096, axis 1", (4096, 4096), 1),
)
SMALL = (
    Case("weight 512x512x3x3, axis 0", (512, 512, 3, 3), 0),
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
    fixed: tuple[Tensor, Tensor]

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs that gradients are taken of."""
        return self.x, self.scale, self.zero


def _made(case: Case, dtype: torch.dtype, device: str) -> Tensors:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, generator=rng)
    dy = torch.randn(case.shape, generator=rng)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    x, dy = (t.to(device, dtype).contiguous(memory_format=layout) for t in (x, dy))
    shape = () if case.axis is None else (case.shape[case.axis],)
    scale = (torch.rand(shape, generator=rng) * 0.1 + 0.3).to(device)
    zero = torch.zeros(shape, device=device)
    fixed = scale.clone(), zero.clone()
    return Tensors(
        x.requires_grad_(), scale.requires_grad_(), zero.requires_grad_(), dy, case.axis, fixed
    )


def _spread(values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    return (
        values if axis is None else values.reshape([-1 if k == axis else 1 for k in range(x.dim())])
    )


def _through(rounded: Tensor, value: Tensor) -> Tensor:
    return value + (rounded - value).detach()


def _composed(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    """The form that people write: straight-through by detach."""
    steps, shift = _spread(scale, x, axis), _spread(_through(zero.round(), zero), x, axis)
    ratio = x.float() / steps
    return (((_through(ratio.round(), ratio) + shift).clamp(QMIN, QMAX) - shift) * steps).to(
        x.dtype
    )


class _ByHand(torch.autograd.Function):
    """The same with its gradient written out: saves less than autograd would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
        ctx.save_for_backward(x, scale, zero)
        ctx.grid = Grid(QMIN, QMAX, axis)
        return compute_forward(x, scale, zero, ctx.grid)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (*compute_backward(dy, *ctx.saved_tensors, ctx.grid), None)


class _FixedByHand(_ByHand):
    """The same with a gradient for x alone."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (
            compute_backward(dy, *ctx.saved_tensors, ctx.grid, (True, False, False))[0],
            None,
            None,
            None,
        )


def _by_hand(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    y: Tensor = _ByHand.apply(x, scale, zero, axis)
    return y


def _fixed_by_hand(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    y: Tensor = _FixedByHand.apply(x, scale, zero, axis)
    return y


def _ours(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    return fake_quantize(x, scale, zero, qmin=QMIN, qmax=QMAX, axis=axis)


def _torch_fixed(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero.int(), QMIN, QMAX)
    return torch.fake_quantize_per_channel_affine(x, scale, zero.int(), axis, QMIN, QMAX)


def _torch_learned(x: Tensor, scale: Tensor, zero: Tensor, axis: int | None) -> Tensor:
    if axis is None:
        y: Tensor = torch._fake_quantize_learnable_per_tensor_affine(
            x, scale.reshape(1), zero.reshape(1), QMIN, QMAX, 1.0
        )
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, axis, QMIN, QMAX, 1.0)
    return y


@dataclass(frozen=True)
class Contender:
    """A way to fake quantize: y of x, scale, zero point and axis; learned: whether the two get gradients."""

    run: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
    learned: bool

    def forward(self, t: Tensors) -> Tensor:
        """y."""
        numbers = (t.scale, t.zero) if self.learned else t.fixed
        return self.run(t.x, *numbers, t.axis)

    def backward(self, y: Tensor, t: Tensors) -> Any:
        """The gradients this contender owes."""
        return torch.autograd.grad(y, t.leaves if self.learned else t.leaves[:1], t.dy)


def _contenders() -> dict[str, Contender]:
    compiled = [
        torch.compile(each, dynamic=False)
        for each in (_composed, _composed, _fixed_by_hand, _by_hand)
    ]
    return {
        _OURS[False]: Contender(_ours, False),
        "torch.fake_quantize_*": Contender(_torch_fixed, False),
        "composed, fixed scale": Contender(_composed, False),
        "torch.compile, fixed scale, autograd": Contender(compiled[0], False),
        "torch.compile, fixed scale, gradient by hand": Contender(compiled[2], False),
        _OURS[True]: Contender(_ours, True),
        "torch._fake_quantize_learnable_*": Contender(_torch_learned, True),
        "composed, autograd": Contender(_composed, True),
        "composed, gradient by hand": Contender(_by_hand, True),
        "torch.compile, autograd": Contender(compiled[1], True),
        "torch.compile, gradient by hand": Contender(compiled[3], True),
    }


@cache
def _trim() -> Callable[[int], Any]:
    """glibc's malloc_trim, which gives the heap's free pages back; nothing elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


class _Clock:
    """Milliseconds of one call; on CUDA between events, or those that the host takes to queue it."""

    def __init__(self, device: str, host: bool = False) -> None:
        self.cuda, self.host = device == "cuda", host

    def __call__(self, work: Callable[[], Any]) -> tuple[float, Any]:
        if self.cuda:
            torch.cuda.synchronize()
        if self.cuda and not self.host:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The host queues the whole call meanwhile: in training it is ahead of the GPU too.
            torch.cuda._sleep(_AHEAD)
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
    x, dy, scale, zero = t.x.detach(), t.dy, *t.fixed
    kernels, grid = choose_kernels(x), Grid(QMIN, QMAX, t.axis)
    if not isinstance(kernels, CompiledKernels):
        y = torch.empty_like(x).copy_(x)
        return {
            _LIMIT: (lambda: y.copy_(x), lambda: torch.add(x, dy, out=y)),
            "copy, add, new output": (x.clone, lambda: x + dy),
        }
    there = prepare_forward(x, scale, zero, grid)
    back = prepare_backward(dy, x, scale, zero, grid, (True, True, True))
    only_x = prepare_backward(dy, x, scale, zero, grid, (True, False, False))
    # One output for all: the same pages, so what they are made of favours nobody.
    out = there.outputs[0]
    assert out is not None
    back.call.y = only_x.call.y = there.call.y
    return {
        _LIMIT: (lambda: out.copy_(x), lambda: torch.add(x, dy, out=out)),
        f"{_KERNELS}, dx alone": (
            partial(kernels.run_call, there),
            partial(kernels.run_call, only_x),
        ),
        _KERNELS: (partial(kernels.run_call, there), partial(kernels.run_call, back)),
        "copy, add, new output": (x.clone, lambda: x + dy),
    }


def _find_wrong(t: Tensors, contenders: dict[str, Contender]) -> list[str]:
    """The contenders whose y or gradients are not those of the reference; what fails is found when it is timed."""
    leaves = [each.detach() for each in t.leaves]
    grid = Grid(QMIN, QMAX, t.axis)
    wanted = compute_forward(*leaves, grid), *compute_backward(t.dy, *leaves, grid)
    wrong = []
    for name, one in contenders.items():
        with contextlib.suppress(RuntimeError, NotImplementedError):
            y = one.forward(t)
            for own, right in zip((y, *one.backward(y, t)), wanted, strict=False):
                if not float((own.detach() - right).abs().mean()) <= 0.05 * float(
                    right.abs().mean()
                ):
                    wrong.append(name)
                    break
    return wrong


def _measure(
    t: Tensors, contenders: dict[str, Contender], rounds: int, clock: _Clock
) -> dict[str, list[float]]:
    """Least forward and backward milliseconds per row; rows that fail once are left out."""
    limits = _limits(t)
    for name in _find_wrong(t, contenders):
        print(f"  {name} left out: it computes something else")
        contenders = {each: one for each, one in contenders.items() if each != name}
    least = {name: [float("inf")] * 2 for name in (*limits, *contenders)}

    def one(name: str) -> tuple[float, float]:
        if not clock.cuda:
            _trim()(0)
            again(name)
        return again(name)

    def again(name: str) -> tuple[float, float]:
        if name in limits:
            return clock(limits[name][0])[0], clock(limits[name][1])[0]
        first, y = clock(partial(contenders[name].forward, t))
        second, _ = clock(partial(contenders[name].backward, y, t))
        return first, second

    for number in range(rounds + 2):
        for name in list(least):
            if number > _FEW and sum(least[name]) > 8 * sum(least[_OURS[True]]):
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


def _shown(
    least: dict[str, list[float]], t: Tensors, contenders: dict[str, Contender], device: str
) -> str:
    size = t.x.numel() * t.x.element_size()
    limit = least[_LIMIT]
    head = ["", "forward ms", "× limit", "backward ms", "× limit", "both ms", "÷ onnxq"]
    if device == "cuda":
        head += ["forward % of copy", "backward % of copy"]
    rows = []
    for name, (first, second) in least.items():
        row = [
            name,
            f"{first:.3f}",
            f"{first / limit[0]:.2f}",
            f"{second:.3f}",
            f"{second / limit[1]:.2f}",
        ]
        against = f"{_against(least, contenders, name):.2f}" if name in contenders else ""
        row += [f"{first + second:.3f}", against]
        if device == "cuda":
            copied = 2 * size / limit[0]
            row += [f"{2 * size / first / copied:.0%}", f"{3 * size / second / copied:.0%}"]
        rows.append(row)
    return measure.table(rows, head)


def _against(least: dict[str, list[float]], contenders: dict[str, Contender], name: str) -> float:
    """How many times as long as ours of the same kind."""
    return sum(least[name]) / sum(least[_OURS[contenders[name].learned]])


def _verdict(least: dict[str, list[float]], contenders: dict[str, Contender]) -> list[str]:
    """One line's figures: the kernels against their limits, and the fastest alternative of each kind."""
    row = []
    for name, way in ((_KERNELS, 0), (f"{_KERNELS}, dx alone", 1), (_KERNELS, 1)):
        row.append(f"{least[name][way] / least[_LIMIT][way]:.2f}" if name in least else "")
    for learned, ours in _OURS.items():
        others = [
            each
            for each in least
            if each in contenders and contenders[each].learned is learned and each != ours
        ]
        best = min(others, key=lambda each: sum(least[each]))
        row += [f"{sum(least[ours]):.3f}", f"{_against(least, contenders, best):.2f} ({best})"]
    return row


def _last_cache() -> int:
    """Bytes of the last cache, as Linux gives it for the first core; 0 where it does not."""
    sizes = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(
        (int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]] for size in sizes), default=0
    )


def main() -> None:
    """Measure every case and print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--small", action="store_true", help="small tensors: what a call costs besides its bytes"
    )
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        help="the first axis of each tensor is so many times as long",
    )
    parser.add_argument(
        "--host", action="store_true", help="on CUDA: what the host takes to queue a call"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    where = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else platform.processor() or platform.machine()
    )
    print(
        f"torch {torch.__version__}, {where}, {options.threads} threads, {options.dtype}, {options.rounds} rounds,",
        end=" ",
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    clock, contenders = _Clock(options.device, options.host), _contenders()
    cache = (
        torch.cuda.get_device_properties().L2_cache_size
        if options.device == "cuda"
        else _last_cache()
    )
    print(f"last cache {cache / 2**20:.0f} MiB" if cache else "last cache of unknown size")
    summary = []
    for case in SMALL if options.small else CASES:
        if options.only not in case.name:
            continue
        torch._dynamo.reset()
        case = replace(case, shape=(case.shape[0] * options.times, *case.shape[1:]))
        t = _made(case, getattr(torch, options.dtype), options.device)
        size = t.x.numel() * t.x.element_size()
        note = ", may lie in the cache" if size < cache else ""
        name = f"{case.name}, first axis × {options.times}" if options.times > 1 else case.name
        print(f"\n## {name}, {size / 1e6:.1f} MB{note}\n")
        least = _measure(t, contenders, options.rounds, clock)
        print(_shown(least, t, contenders, options.device), flush=True)
        summary.append([name + ("*" if note else ""), *_verdict(least, contenders)])
    print("\n## All\n")
    print(measure.table(summary, SUMMARY))
    print("\n" + ", ".join(f"{device}: {state}" for device, state in available().items()))


if __name__ == "__main__":
    main()
