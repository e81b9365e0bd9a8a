"""torch.fx tracing that does not give up: what cannot be traced becomes one opaque module, and is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from onnxq.config import did_you_mean, matches
from onnxq.errors import ConfigError
from onnxq.sites import Refusal
from torch_frontend.qmodules import of_module

# More failures than this, and the model is converted without tracing.
_TRIES = 64


@dataclass(frozen=True)
class Traced:
    """A graph over the modules of `root`. opaque: modules that could not be traced, and why. skipped: as asked."""

    root: nn.Module
    graph: fx.Graph
    opaque: tuple[Refusal, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Untraceable:
    """The model's own forward cannot be traced."""

    reason: str


class Tracer(fx.Tracer):
    """Leaves: torch's own layers, modules with an entry in the registry, modules to skip, and what failed before."""

    def __init__(self, skip: Sequence[str] = (), opaque: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.skip, self.opaque = tuple(skip), opaque
        self.skipped: list[str] = []
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True for a module that is not looked into."""
        name = module_qualified_name
        if self.skip and matches(self.skip, name):
            if name not in self.skipped:
                self.skipped.append(name)
            return True
        return name in self.opaque or of_module(m) is not None or super().is_leaf_module(m, name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As fx; remembers the innermost module that failed."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise


@dataclass
class _Tries:
    opaque: dict[str, str] = field(default_factory=dict)


def trace(model: nn.Module, skip: Sequence[str] = ()) -> Traced | Untraceable:
    """The graph of the model's forward, in the mode (train or eval) the model is in.

    skip: patterns of module names that are not looked into. A module whose forward cannot be traced (control flow on
    values or shapes, code outside torch) becomes opaque; when the model's own forward cannot be, Untraceable.
    Raises ConfigError for a pattern that matches no module.
    """
    check_patterns(model, skip)
    tries = _Tries()
    for _ in range(_TRIES):
        tracer = Tracer(skip, frozenset(tries.opaque))
        try:
            graph = tracer.trace(model)
        except Exception as error:  # whatever the user's forward raises on a proxy
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            if tracer.failed is None or tracer.failed in tries.opaque:
                return Untraceable(reason)
            tries.opaque[tracer.failed] = reason
            continue
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        refusals = [_refusal(name, why) for name, why in tries.opaque.items() if name in called]
        return Traced(tracer.root, graph, tuple(refusals), tuple(tracer.skipped))
    return Untraceable(f"{_TRIES} of its modules cannot be traced")


def check_patterns(model: nn.Module, skip: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no module."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in skip:
        if not any(matches(pattern, name) for name in names):
            raise ConfigError(f"torch.skip_trace: {pattern!r}", "matches no module", did_you_mean(pattern, names))


def _refusal(name: str, reason: str) -> Refusal:
    return Refusal(
        name,
        f"its forward cannot be traced ({reason}): only the layers inside it are quantized, not what connects them",
        "take control flow on values and shapes out of its forward, or leave it out with torch.skip_trace",
        "tracing",
    )
