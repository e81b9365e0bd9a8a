"""Calls of a forward in train and in eval mode, to see whether one graph serves both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_frontend.tracing.values import keep_modes

# Functions that take a mode, which a graph follows: their names and numbers decide nothing.
_FOLLOWING = (
    functional.dropout, torch.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.scaled_dot_product_attention, functional.batch_norm,
)  # fmt: skip


@dataclass(frozen=True)
class SeenCall:
    """A call of one of torch's functions. name: with its numbers. dropout: of attention."""

    name: str
    attends: bool = False
    dropout: float = 0.0


class _CallRecorder(TorchFunctionMode):
    """Records the calls outside of layers while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SeenCall] = []
        self.depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, then make it."""
        kwargs = kwargs or {}
        if not self.depth:
            name = getattr(func, "__name__", str(func))
            if func is functional.scaled_dot_product_attention:
                self.calls.append(
                    SeenCall(name, True, float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)))
                )
            elif func in _FOLLOWING:
                self.calls.append(SeenCall(name))
            else:
                plain = [
                    leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (bool, int, float, str))
                ]
                self.calls.append(SeenCall(f"{name}{plain}"))
        return func(*args, **kwargs)

    def enter_layer(self, *_: Any) -> None:
        """Hook in front of a layer."""
        self.depth += 1

    def leave_layer(self, *_: Any) -> None:
        """Hook behind a layer."""
        self.depth -= 1


def list_calls(
    model: nn.Module, args: Any, kwargs: Any, is_leaf: Callable[[nn.Module, str], bool], *, training: bool
) -> list[SeenCall] | None:
    """Calls of the forward in a mode, outside of layers; None if it does not run. The model does not change."""
    recorder = _CallRecorder()
    handles = []
    for path, module in model.named_modules():
        if path and is_leaf(module, path):
            handles.append(module.register_forward_pre_hook(recorder.enter_layer))
            handles.append(module.register_forward_hook(recorder.leave_layer, always_call=True))
    # Batch norms count in train mode.
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if isinstance(buffer, Tensor)]
    try:
        with keep_modes(model), torch.no_grad(), torch.random.fork_rng(), recorder:
            model.train(training)
            model(*args, **kwargs)
    except Exception:  # the user's forward may raise anything
        return None
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
    return recorder.calls
