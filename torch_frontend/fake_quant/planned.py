"""Kernels on a grid: the launches of a plan, one after the other, whoever runs them (a GPU, or its emulation)."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache

import torch

from onnxq.kernels import Call, DType, Layout, backward_plan, forward_plan
from torch_frontend.fake_quant.calls import CompiledKernels, Prepared

# Kernel, blocks, and a call with its geometry filled in.
_Launches = tuple[tuple[str, int, Call], ...]
_POINTERS = ("x", "dy", "y", "scale", "zero_point", "dscale", "dzero_point", "partial")
_GIVEN = (*_POINTERS, "grad_scale", "zero_point_grad_scale", "qmin", "qmax", "flags")


class PlannedKernels(CompiledKernels):
    """Runs what `onnxq.kernels.launch` plans."""

    @abstractmethod
    def launch(self, kernel: str, grid: int, call: Call, device: torch.device) -> None:
        """Start `kernel` with `grid` blocks, after all that was started before."""

    def run_forward(self, prepared: Prepared) -> None:
        """Fill y."""
        launches, _ = _launches(prepared.layout, DType(prepared.call.dtype), None)
        self._run(launches, prepared)

    def run_backward(self, prepared: Prepared) -> None:
        """Fill dx, dscale and dzero_point, those that have an output."""
        parameters = any(output is not None for output in prepared.outputs[1:])
        launches, scratch = _launches(prepared.layout, DType(prepared.call.dtype), parameters)
        if scratch:
            # Freed when this returns, and given out again only to work that is queued behind the kernels.
            partial = torch.empty(scratch // 8, dtype=torch.float64, device=prepared.device)
            prepared.call.partial = partial.data_ptr()
        self._run(launches, prepared)

    def _run(self, launches: _Launches, prepared: Prepared) -> None:
        for kernel, grid, geometry in launches:
            call = Call.from_buffer_copy(geometry)
            for name in _GIVEN:
                setattr(call, name, getattr(prepared.call, name))
            self.launch(kernel, grid, call, prepared.device)


@lru_cache(maxsize=4096)
def _launches(layout: Layout, dtype: DType, parameters: bool | None) -> tuple[_Launches, int]:
    """The launches of forward (parameters None) or backward, and the bytes of scratch they need."""
    plan = forward_plan(layout, dtype) if parameters is None else backward_plan(layout, dtype, parameters=parameters)
    return tuple((one.kernel, one.grid, one.fill(Call())) for one in plan.launches), plan.partial_bytes
