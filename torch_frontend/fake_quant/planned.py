"""The launches of a kernel plan, one after the other, on a GPU or its emulation."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache

import torch

from onnxq.kernels import Call, DType, Layout, backward_plan, forward_plan
from torch_frontend.fake_quant.calls import CompiledKernels, Prepared

# (kernel, blocks, call with its geometry filled in)
_Launches = tuple[tuple[str, int, Call], ...]
# Fields that differ from call to call; the geometry depends on the layout alone and is cached.
_POINTERS = ("x", "dy", "y", "scale", "zero_point", "dscale", "dzero_point", "partial")
_GIVEN = (*_POINTERS, "grad_scale", "zero_point_grad_scale", "qmin", "qmax", "flags")


class PlannedKernels(CompiledKernels):
    """Kernels run by the plans of `onnxq.kernels.launch`."""

    @abstractmethod
    def launch(self, kernel: str, grid: int, call: Call, device: torch.device) -> None:
        """Launch `kernel` with `grid` blocks, behind all earlier launches."""

    def run(self, prepared: Prepared) -> None:
        """Fill the outputs."""
        parameters = any(output is not None for output in prepared.outputs[1:]) if prepared.backward else None
        launches, scratch = _plan_launches(prepared.layout, DType(prepared.call.dtype), parameters)
        if scratch:
            # Freed when this returns, before the kernels have run: torch's allocator gives the memory only to work that
            # is queued behind them on the same stream.
            partial = torch.empty(scratch // 8, dtype=torch.float64, device=prepared.device)
            prepared.call.partial = partial.data_ptr()
        for kernel, grid, geometry in launches:
            call = Call.from_buffer_copy(geometry)
            for name in _GIVEN:
                setattr(call, name, getattr(prepared.call, name))
            self.launch(kernel, grid, call, prepared.device)


@lru_cache(maxsize=4096)
def _plan_launches(layout: Layout, dtype: DType, parameters: bool | None) -> tuple[_Launches, int]:
    """(launches, bytes of scratch memory) of forward (parameters None) or of backward.

    parameters: whether backward computes dscale or dzero_point.
    """
    plan = forward_plan(layout, dtype) if parameters is None else backward_plan(layout, dtype, parameters=parameters)
    return tuple((one.kernel, one.grid, one.fill(Call())) for one in plan.launches), plan.partial_bytes
