"""torch.fx tracing that does not give up: a module that cannot be traced becomes opaque and is reported by name.

With the user's example, loops and `if` on shapes and types are followed: every call is repeated on tensors without data
(torch's fake tensors), so nothing is computed or changed. Results that depend on values stay unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.proxy import Attribute
from torch.utils import _pytree as pytree

from onnxq.config import matches_any, suggest_names
from onnxq.errors import ConfigError
from onnxq.sites import Names, NameSet, Refusal, Refusals
from torch_frontend.qmodules import find_entry
from torch_frontend.tracing.attention import TRACEABLE_FORMS, make_traceable
from torch_frontend.tracing.batch_norms import compare_batch_norms
from torch_frontend.tracing.modules import Args, Kwargs, find_module, run_call
from torch_frontend.tracing.signature import find_fixed_arguments, require_default
from torch_frontend.tracing.values import keep_buffers, keep_modes, use_eval_mode

# Key of a node's meta, there while tracing only.
_FAKE = "onnxq_fake"
_UNKNOWN = object()
# Values of the forward's parameters, by name.
Arguments = Mapping[str, Any] | None


class KnowingProxy(fx.Proxy):
    """A proxy with the length of its value in the example."""

    def __len__(self) -> int:
        known = read_example_value(self)
        return super().__len__() if known is _UNKNOWN else len(known)

    def __getattr__(self, name: str) -> KnowingAttribute:
        return KnowingAttribute(self, name)


class KnowingAttribute(Attribute):
    """The same for attributes, as in len(x.shape)."""

    __len__ = KnowingProxy.__len__
    __getattr__ = KnowingProxy.__getattr__


def read_example_value(proxy: fx.Proxy) -> Any:
    """The proxy's value in the example, or _UNKNOWN."""
    return proxy.node.meta.get(_FAKE, _UNKNOWN)


class Example:
    """Values of the example, call by call.

    given: argument -> value; None: all values are unknown. specialised: scopes whose control flow the example has
    decided, as ordered keys.
    """

    def __init__(self, given: Arguments) -> None:
        # Parameters stay real tensors: only their shapes are read.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.given = pytree.tree_map_only(Tensor, self.mode.from_tensor, given)
        # True while a call is repeated; the tracer must not record these calls.
        self.running = False
        self.specialised: dict[str, None] = {}

    def repeat_call(self, root: nn.Module, node: fx.Node) -> None:
        """Repeat the node's call on the example's values of its arguments."""
        if self.given is None or self.running or node.op == "output":
            return
        if any(source.meta.get(_FAKE, _UNKNOWN) is _UNKNOWN for source in node.all_input_nodes):
            return
        self.running = True
        try:
            with self.mode, torch.no_grad():
                node.meta[_FAKE] = self._compute_value(root, node)
        except Exception:  # the call needs data: its result is unknown
            node.meta.pop(_FAKE, None)
        finally:
            self.running = False

    def _compute_value(self, root: nn.Module, node: fx.Node) -> Any:
        if node.op == "placeholder":
            name = str(node.target)
            default = node.args[0] if node.args else () if name.startswith("*") else _UNKNOWN
            return self.given.get(name.lstrip("*"), default)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta[_FAKE])
        module = find_module(root, node)
        # In training mode a batch norm would write into its averages.
        with nullcontext() if module is None else use_eval_mode(module):
            return run_call(root, node, args, kwargs)

    def decide_truth(self, proxy: fx.Proxy, scope: str) -> bool | None:
        """Outcome of an `if` on sizes, types and the like in the example; None where it depends on values."""
        known = read_example_value(proxy)
        if known is _UNKNOWN or isinstance(known, Tensor):
            return None
        self.specialised[scope] = None
        return bool(known)

    def list_items(self, proxy: fx.Proxy, scope: str) -> Iterator[fx.Proxy] | None:
        """Elements of a value that a loop or a * iterates over; None where their number is unknown."""
        known = read_example_value(proxy)
        if known is _UNKNOWN or not isinstance(known, (Tensor, tuple, list)):
            return None
        self.specialised[scope] = None
        return iter([proxy[k] for k in range(len(known))])


def forget_example(graph: fx.Graph) -> None:
    """Remove the example's values from the graph."""
    for node in graph.nodes:
        node.meta.pop(_FAKE, None)


# Traces of the whole model, one per module that fails; beyond that it is converted layer by layer.
_TRIES = 64


class GraphOrigin(Enum):
    """Where the graph of a model comes from."""

    SYMBOLIC = "torch.fx"
    EXPORTED = "torch.export"
    # A GraphModule's own.
    GIVEN = "given"
    # None: layer by layer.
    LAYERS = "layers"


@dataclass(frozen=True)
class Traced:
    """A graph over the modules of `root`.

    opaque: modules that could not be traced, with reasons. skipped: modules that match `torch.skip_trace`. fixed:
    arguments that keep their defaults. refusals: parts of the forward that the graph lacks: calls of the other mode,
    train or eval, and results. shaped: modules whose control flow on shapes the example decided.
    """

    root: nn.Module
    graph: fx.Graph
    opaque: Refusals = ()
    skipped: Names = ()
    fixed: Names = ()
    refusals: Refusals = ()
    shaped: Names = ()
    origin: GraphOrigin = GraphOrigin.SYMBOLIC


@dataclass(frozen=True)
class Untraceable:
    """The model's own forward cannot be traced."""

    reason: str


class _NoNames(dict[str, Any]):
    """No arguments for `**kwargs`: fx writes no valid code for a plain dict, which it takes apart."""


class Tracer(fx.Tracer):
    """fx.Tracer with these leaves: torch's own layers, registered modules, skipped modules, and those in `opaque`.

    skip: patterns of names. opaque: paths that failed before. fixed: argument -> default. given: argument -> example.
    skipped, failed: paths met while tracing.
    """

    # Without arguments when fx traces the code of a pickled graph again.
    def __init__(
        self,
        skip: Sequence[str] = (),
        opaque: NameSet = frozenset(),
        fixed: Arguments = None,
        given: Arguments = None,
    ) -> None:
        super().__init__()
        self.example = Example(given)
        self.skip = tuple(skip)
        self.opaque = opaque
        self.fixed = fixed or {}
        self.skipped: list[str] = []
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True for a module whose forward is not traced."""
        name = module_qualified_name
        if self.skip and matches_any(self.skip, name):
            if name not in self.skipped:
                self.skipped.append(name)
            return True
        if name in self.opaque:
            return True
        # torch.nn modules are leaves for fx, but these have a traceable form.
        if type(m) in TRACEABLE_FORMS:
            return False
        return find_entry(type(m)) is not None or super().is_leaf_module(m, name)

    def _proxy_placeholder(self, name: str, *rest: Any) -> Any:
        """Give forward the default of a fixed argument, and the graph an input that is checked against it."""
        # Arguments that the forward does not name: none, see trace_model.
        if name.startswith("**"):
            return _NoNames()
        if name not in self.fixed:
            return super()._proxy_placeholder(name, *rest)
        default = self.fixed[name]
        placeholder = self.create_proxy("placeholder", name, (default,), {})
        self.create_proxy("call_function", require_default, (placeholder, name, default), {})
        return default

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """As fx; the call is repeated on the example."""
        proxy = super().create_proxy(*args, **kwargs)
        self.example.repeat_call(self.root, proxy.node)
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy that has a length where its value in the example has one."""
        return KnowingProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """As fx; while a call is repeated on the example, parameters are themselves."""
        if self.example.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Outcome of an `if` on sizes and types in the example."""
        known = self.example.decide_truth(obj, self.scope.module_path)
        return super().to_bool(obj) if known is None else known

    def iter(self, obj: fx.Proxy) -> Any:
        """Iterate over a shape as often as in the example."""
        known = self.example.list_items(obj, self.scope.module_path)
        return super().iter(obj) if known is None else known

    def call_module(self, m: nn.Module, forward: Any, args: Args, kwargs: Kwargs) -> Any:
        """As fx, with the traceable form of torch's transformer modules; remembers the innermost module that failed."""
        if self.example.running:
            return forward(*args, **kwargs)
        form = TRACEABLE_FORMS.get(type(m))
        if form is not None:
            forward = partial(form, m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            # The exception passes through all callers; the first to see it is the innermost.
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise


def trace_model(
    model: nn.Module, skip: Sequence[str], arguments: Arguments
) -> Traced | Untraceable:
    """The graph of the model's forward, in the mode (train or eval) of the model.

    skip: patterns of names of modules that are not traced. arguments: those that will be passed, with an example
    of each, whose shapes decide control flow on shapes; None: arguments without a default, and no such control flow.
    The other arguments keep their defaults for good.
    A module whose forward cannot be traced (control flow on values or shapes, code outside torch) becomes opaque. If
    it is the model's own forward, Untraceable. Raises ConfigError for a pattern that matches no module.
    """
    check_patterns(model, skip)
    root = make_traceable(model)
    fixed = find_fixed_arguments(root, arguments)
    failed: dict[str, str] = {}
    parameters = inspect.signature(root.forward).parameters
    if any(parameters[name].kind is inspect.Parameter.VAR_KEYWORD for name in arguments or ()):
        return Untraceable("it is called with arguments that its forward does not name")
    # Used only where a plain trace fails: it fixes the shapes that decide control flow.
    example = None
    for _ in range(_TRIES):
        tracer = Tracer(skip, frozenset(failed), fixed, example)
        try:
            graph = _trace_calls(tracer, root)
        except Exception as error:  # the user's forward may raise anything on a proxy
            if example is None and arguments is not None:
                example = arguments
                continue
            reason = shorten_error(error)
            if tracer.failed is None or tracer.failed in failed:
                return Untraceable(reason)
            failed[tracer.failed] = reason
            continue
        # A module that failed may no longer be called once its caller is opaque.
        called = {str(node.target) for node in graph.find_nodes(op="call_module")}
        refusals = [_make_refusal(name, why) for name, why in failed.items() if name in called]
        modes = _compare_modes(root, tracer, graph, example)
        shaped = tuple(tracer.example.specialised)
        forget_example(graph)
        return Traced(
            tracer.root, graph, tuple(refusals), tuple(tracer.skipped), tuple(fixed), modes, shaped
        )
    return Untraceable(f"{_TRIES} of its modules cannot be traced")


def _trace_calls(tracer: Tracer, root: nn.Module) -> fx.Graph:
    """The graph of a forward. Raises TypeError for one that writes into buffers, which a trace executes or loses."""
    counts = [(name, buffer, buffer._version) for name, buffer in root.named_buffers()]
    with keep_buffers(root):
        graph = tracer.trace(root)
        after = dict(root.named_buffers())
        for name, buffer, count in counts:
            written = buffer._version != count or isinstance(after.get(name), fx.Proxy)
            # Batch norms, which are replaced by modules, count their batches.
            if written and not name.endswith("num_batches_tracked"):
                raise TypeError(f"it writes into the buffer {name!r}")
    return graph


def _compare_modes(
    root: nn.Module, tracer: Tracer, graph: fx.Graph, example: Arguments
) -> Refusals:
    """A Refusal if train and eval mode make different calls: the graph holds those of one mode."""
    before = set(vars(root))
    try:
        with keep_modes(root):
            root.train(not root.training)
            other = _trace_calls(Tracer(tracer.skip, tracer.opaque, tracer.fixed, example), root)
    except Exception:  # the other mode cannot be traced, so it differs
        other = fx.Graph()
    finally:
        for name in set(vars(root)) - before:  # constants made in the forward, which fx keeps there
            delattr(root, name)
    # The targets of get_attr nodes are left out: fx goes on numbering constants from trace to trace.
    calls = [
        [(n.op, n.op == "get_attr" or str(n.target), len(n.args)) for n in trace.nodes]
        for trace in (graph, other)
    ]
    if calls[0] == calls[1]:
        compare_batch_norms(graph, other)
        return ()
    return (refuse_mode(root),)


def refuse_mode(model: nn.Module) -> Refusal:
    """A Refusal for a model whose graph holds the calls of one mode, train or eval, and whose other mode has others."""
    mode, lost = ("train", "eval") if model.training else ("eval", "train")
    reason = f"its forward does other things in {lost} mode, which are lost: it was traced in {mode} mode"
    fix = "take `if self.training` out of its forward, or trace it in the mode you need"
    return Refusal(type(model).__name__, reason, fix, "mode", "R108")


def check_patterns(model: nn.Module, skip: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no module."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in skip:
        if not any(matches_any(pattern, name) for name in names):
            raise ConfigError(
                f"torch.skip_trace: {pattern!r}",
                "matches no module",
                suggest_names(pattern, names),
                code="Q309",
            )


def shorten_error(error: Exception) -> str:
    """The error's class and first sentence; fx's messages are a page long."""
    text = (str(error).strip().splitlines() or [""])[0].split(". ")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _make_refusal(name: str, reason: str) -> Refusal:
    return Refusal(
        name,
        f"its forward cannot be traced ({reason}): only the layers inside it are quantized, not what connects them",
        "take control flow on values and shapes out of its forward, or leave it out with torch.skip_trace",
        "tracing",
        "R108",
    )
