"""torch.fx tracing that does not give up: what cannot be traced becomes one opaque module, and is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx, nn

from onnxq.config import did_you_mean, matches
from onnxq.errors import ConfigError
from onnxq.sites import Refusal
from torch_frontend.qmodules import of_module
from torch_frontend.tracing.arguments import fixed_arguments, require_default
from torch_frontend.tracing.attention import FORMS, traceable
from torch_frontend.tracing.example import Example, KnowingProxy, forget

# More failures than this, and the model is converted without tracing.
_TRIES = 64


@dataclass(frozen=True)
class Traced:
    """A graph over the modules of `root`.

    opaque: modules that could not be traced, and why. skipped: as asked. fixed: arguments that keep their defaults.
    modes: what the other mode would have done. shaped: modules whose control flow on shapes the example decided.
    """

    root: nn.Module
    graph: fx.Graph
    opaque: tuple[Refusal, ...] = ()
    skipped: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    modes: tuple[Refusal, ...] = ()
    shaped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Untraceable:
    """The model's own forward cannot be traced."""

    reason: str


class Tracer(fx.Tracer):
    """Leaves: torch's own layers, modules with an entry in the registry, modules to skip, and what failed before."""

    def __init__(
        self,
        skip: Sequence[str] = (),
        opaque: frozenset[str] = frozenset(),
        fixed: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.example = None if given is None else Example(given)
        self.skip, self.opaque, self.fixed = tuple(skip), opaque, fixed or {}
        self.skipped: list[str] = []
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True for a module that is not looked into."""
        name = module_qualified_name
        if self.skip and matches(self.skip, name):
            if name not in self.skipped:
                self.skipped.append(name)
            return True
        if name in self.opaque:
            return True
        if type(m) in FORMS:
            return False
        return of_module(m) is not None or super().is_leaf_module(m, name)

    def _proxy_placeholder(self, name: str, *rest: Any) -> Any:
        """The forward sees the value of a fixed argument; the graph has the argument and looks at what it is given."""
        if name not in self.fixed:
            return super()._proxy_placeholder(name, *rest)
        default = self.fixed[name]
        made = self.create_proxy("placeholder", name, (default,), {})
        self.create_proxy("call_function", require_default, (made, name, default), {})
        return default

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """As fx; with an example the call is followed on it."""
        made = super().create_proxy(*args, **kwargs)
        if self.example is not None:
            self.example.follow(self.root, made.node)
        return made

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """With an example, one that knows its length."""
        return fx.Proxy(node, self) if self.example is None else KnowingProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters are proxies while tracing, and themselves while a call is made on the example."""
        if self.example is not None and self.example.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An `if` on sizes and types goes the example's way."""
        known = None if self.example is None else self.example.truth(obj, self.scope.module_path)
        return super().to_bool(obj) if known is None else known

    def iter(self, obj: fx.Proxy) -> Any:
        """A loop over a shape has as many rounds as in the example."""
        known = None if self.example is None else self.example.items(obj, self.scope.module_path)
        return super().iter(obj) if known is None else known

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As fx; remembers the innermost module that failed."""
        if self.example is not None and self.example.running:
            return forward(*args, **kwargs)
        form = FORMS.get(type(m))
        if form is not None:
            forward = partial(form, m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise


def trace(model: nn.Module, skip: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> Traced | Untraceable:
    """The graph of the model's forward, in the mode (train or eval) the model is in.

    skip: patterns of module names that are not looked into. given: the arguments that will be passed, with an example
    of each, whose shapes decide control flow on shapes (None: arguments without a default, and no control flow); the
    others keep their defaults for good. A module whose forward cannot be traced (control flow
    on values or shapes, code outside torch) becomes opaque; when the model's own forward cannot be, Untraceable.
    Raises ConfigError for a pattern that matches no module.
    """
    check_patterns(model, skip)
    root = traceable(model)
    fixed = fixed_arguments(root, given)
    failed: dict[str, str] = {}
    example: Mapping[str, Any] | None = None  # needed only where a plain trace fails
    for _ in range(_TRIES):
        tracer = Tracer(skip, frozenset(failed), fixed, example)
        try:
            graph = tracer.trace(root)
        except Exception as error:  # whatever the user's forward raises on a proxy
            if example is None and given is not None:
                example = given
                continue
            reason = _in_short(error)
            if tracer.failed is None or tracer.failed in failed:
                return Untraceable(reason)
            failed[tracer.failed] = reason
            continue
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        refusals = [_refusal(name, why) for name, why in failed.items() if name in called]
        modes = _by_mode(root, tracer, graph, example)
        shaped = () if tracer.example is None else tuple(tracer.example.specialised)
        forget(graph)
        return Traced(tracer.root, graph, tuple(refusals), tuple(tracer.skipped), tuple(fixed), modes, shaped)
    return Untraceable(f"{_TRIES} of its modules cannot be traced")


def _by_mode(root: nn.Module, tracer: Tracer, graph: fx.Graph, given: Mapping[str, Any] | None) -> tuple[Refusal, ...]:
    """A Refusal when train and eval mode run different calls: a graph holds those of one."""
    modes = [(module, module.training) for module in root.modules()]
    before = set(vars(root))
    try:
        root.train(not root.training)
        other = Tracer(tracer.skip, tracer.opaque, tracer.fixed, given).trace(root)
    except Exception:  # the other mode cannot be traced: it differs
        other = fx.Graph()
    finally:
        for module, mode in modes:
            module.training = mode
        for name in set(vars(root)) - before:  # constants made in the forward, which fx keeps there
            delattr(root, name)
    # Constants are numbered on from trace to trace.
    calls = [[(n.op, n.op == "get_attr" or str(n.target), len(n.args)) for n in one.nodes] for one in (graph, other)]
    if calls[0] == calls[1]:
        return ()
    kept, lost = ("train", "eval") if root.training else ("eval", "train")
    reason = f"its forward does other things in {lost} mode, which are lost: it was traced in {kept} mode"
    fix = "take `if self.training` out of its forward, or trace it in the mode you need"
    return (Refusal(type(root).__name__, reason, fix, "mode", "R108"),)


def check_patterns(model: nn.Module, skip: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no module."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in skip:
        if not any(matches(pattern, name) for name in names):
            raise ConfigError(
                f"torch.skip_trace: {pattern!r}", "matches no module", did_you_mean(pattern, names), code="Q309"
            )


def _in_short(error: Exception) -> str:
    """The error's kind and first sentence: fx's own go on for a page."""
    text = (str(error).splitlines() or [""])[0].split(". ")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _refusal(name: str, reason: str) -> Refusal:
    return Refusal(
        name,
        f"its forward cannot be traced ({reason}): only the layers inside it are quantized, not what connects them",
        "take control flow on values and shapes out of its forward, or leave it out with torch.skip_trace",
        "tracing",
        "R108",
    )
