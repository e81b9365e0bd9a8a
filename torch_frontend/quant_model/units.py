"""Units: the calls of a graph that the target could run quantized, with what they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import fx, nn

from onnxq.config import Config, MultiInput, did_you_mean
from onnxq.errors import ConfigError
from onnxq.plan import Bound
from onnxq.sites import Refusal, Unquantized
from onnxq.targets import Output, target
from torch_frontend.qmodules import Op, WeightQuantized, convertible, op_names
from torch_frontend.quant_model.places import PLACES, Place
from torch_frontend.quant_model.residual import op_of, skip_operand
from torch_frontend.quant_model.slots import Slot, slots
from torch_frontend.quant_model.wishes import Asker
from torch_frontend.tracing import Named, is_constant, is_float, named, site_of

# What stands between the scores of attention and its softmax.
_MASKING, _SCORED = ("add", "sub", "where"), ("softmax", "log_softmax")

Data = tuple[tuple[Slot, fx.Node], ...]


@dataclass(frozen=True, eq=False)
class Weight:
    """A unit's weight. module: the layer that holds it; else it is the graph value in the `slot` of `reader`."""

    site: str
    axis: int
    block_axis: int
    module: str = ""
    slot: Slot | None = None
    value: fx.Node | None = None
    reader: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Unit:
    """A call with its place. data: the activations it reads; out: the value whose pair closes it."""

    node: fx.Node
    name: Named
    place: Place
    data: Data
    out: fx.Node
    weight: Weight | None = None
    policy: MultiInput | None = None
    bound: Bound = (None, None)

    @property
    def asker(self) -> Asker:
        """The unit as rules may name it."""
        return asker_of(self.name)

    @property
    def op(self) -> str:
        """Its operator."""
        return "" if self.name.entry is None else self.name.entry.op.name


@dataclass
class Found:
    """All units in topological order, by node and by the value they close with; and what is refused."""

    units: list[Unit] = field(default_factory=list)
    reasons: list[Unquantized] = field(default_factory=list)
    by_node: dict[fx.Node, Unit] = field(default_factory=dict)
    by_out: dict[fx.Node, Unit] = field(default_factory=dict)


def asker_of(name: Named) -> Asker:
    """A call as rules may name it: by path; by operator in torch's words or in ONNX's."""
    op = name.entry.op if name.entry is not None else None
    return Asker(name.path, (op.name, *op.onnx) if op is not None else ("",))


def check_policies(config: Config) -> None:
    """Raise ConfigError for a `multi_input` that names no operator."""
    for op, _ in config.torch.multi_input:
        if op not in op_names():
            where = config.where("torch.multi_input")
            raise ConfigError(where / op, "is no operator", did_you_mean(op, op_names()), code="Q309")


def find_units(model: fx.GraphModule, config: Config, skipped: Collection[str] = ()) -> Found:
    """Every call the target has a place for. Calls it has a reason to leave float come back with the reason.

    skipped: modules that the person asked to leave alone.
    """
    found = Found()
    places = PLACES[config.target]
    for node in model.graph.nodes:
        name = named(node)
        if name is None or name.path in skipped:
            continue
        reason: Unquantized | None = None
        if name.entry is None:
            reason = _unknown(model, node, name)
        elif name.entry.op.refused is not None:
            reason = Refusal(name.path, *name.entry.op.refused, "no-kernel", "R101")
        else:
            unit, reason = _unit(model, node, name, config, places)
            if unit is not None:
                found.units.append(unit)
                found.by_node[node] = unit
                found.by_out[unit.out] = unit
        if reason is not None:
            found.reasons.append(reason)
    return found


def _unknown(model: fx.GraphModule, node: fx.Node, name: Named) -> Refusal:
    if node.op == "call_module":
        what = type(model.get_submodule(str(node.target))).__name__
        fix = "register it with @register_qmodule, or take it out of torch.skip_trace if it stands there"
    else:
        what, fix = f"{node.target if isinstance(node.target, str) else name.path}", "register it, or leave it"
    return Refusal(name.path, f"nothing is known of {what}: it stays float", fix, "registry", "R109")


def _unit(
    model: fx.GraphModule, node: fx.Node, name: Named, config: Config, places: Mapping[str, Place]
) -> tuple[Unit | None, Unquantized | None]:
    assert name.entry is not None
    op = name.entry.op
    policy = config.torch.policy(op.name)
    place = _place(places.get(op.name), policy)
    if place is None:
        engine = target(config.target, config.mode)
        return None, next((why for word in op.onnx if (why := engine.without_kernel(name.path, word))), None)
    data = tuple(
        (slot, value) for param in name.entry.data for slot, value in slots(node, name.entry, param)
        if is_float(value) and not is_constant(value) and site_of(value) is not None
    )  # fmt: skip
    weight, why = _weight(model, node, name)
    if place.two is not None and len({value for _, value in data}) == 2:
        place = place.two
    if place.activations is not None and len({value for _, value in data}) != place.activations:
        refused = place.compute and op.name == "matmul"
        return None, _wrong_operands(name, place, data) if refused else None
    if op.name in _MASKING and policy is None and _masks_scores(node):
        return None, None
    if op.name in _SCORED and policy is None and data and op_of(data[0][1]) in (*_MASKING, "masked_fill"):
        reason = "reads scores that may be masked with -inf, which no range holds: it stays float"
        fix = "where nothing is masked, write `torch: {multi_input: {softmax: insert}}`"
        return None, Refusal(name.path, reason, fix, "masked-scores", "R102")
    if why is not None:
        return None, Refusal(name.path, why, "give it a plain weight", "weight", "R110")
    if _moves_nothing(model, node, op.name):
        place = replace(place, inputs="none", compute=False)
    if place.inputs == "skip":
        k = skip_operand(node, [value for _, value in data])
        if k is None:
            return None, None
        data = (data[k],)
    elif place.inputs == "none":
        data = data if place.joins else ()
    if not data and weight is None:
        return None, None
    _check_leader(name, policy, data, config)
    out = _behind(node, place)
    return Unit(
        node, name, place, data, out, weight, policy, bound_of(model, out) if out is not node else (None, None)
    ), None


def _masks_scores(node: fx.Node) -> bool:
    """True for what stands between the scores of attention and its softmax: masks hold -inf."""
    readers = [op_of(user) for user in node.users]
    return bool(readers) and all(op in _SCORED for op in readers)


def _place(place: Place | None, policy: MultiInput | None) -> Place | None:
    """The target's place, changed by what the person asked of the operator."""
    if policy is None:
        return place
    if policy.policy == "none":
        return None if place is None else replace(place, inputs="none", output=Output.FLOAT)
    asked = place or Place()
    return replace(asked, inputs="all", compute=True, joins=False, activations=None)


def _check_leader(name: Named, policy: MultiInput | None, data: Data, config: Config) -> None:
    if policy is not None and policy.policy == "follow" and data and policy.leader >= len(data):
        raise ConfigError(
            config.where("torch.multi_input") / f"follow: {policy.leader}",
            f"{name.path} has {len(data)} computed inputs, counted from 0",
            "name one of them",
            code="Q309",
        )


def _wrong_operands(name: Named, place: Place, data: Data) -> Refusal:
    asked = "one computed operand and one weight" if place.activations == 1 else "two computed operands"
    has = f"{len({value for _, value in data})} computed operands"
    return Refusal(
        name.path, f"its kernel takes {asked}, this call has {has}: it stays float", rule="operands", code="R102"
    )


def _weight(model: fx.GraphModule, node: fx.Node, name: Named) -> tuple[Weight | None, str | None]:
    """The unit's weight; or why it cannot have one."""
    assert name.entry is not None
    op = name.entry.op
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        qmodule = name.entry.qmodule
        if op.weight is not None and qmodule is not None and issubclass(qmodule, WeightQuantized):
            why = convertible(module)
            return (None, why) if why else (
                Weight(f"{name.path}.{op.weight}", op.weight_axis, op.block_axis, module=name.path), None
            )  # fmt: skip
    if op.weight is None and op.name != "matmul":
        return None, None
    for slot, value in slots(node, name.entry, op.weight or name.entry.params[1]):
        if is_constant(value):
            return _parameter(op, node, slot, value), None
    return None, None


def _parameter(op: Op, node: fx.Node, slot: Slot, value: fx.Node) -> Weight | None:
    """The parameter behind a constant operand; of rows cut out of one, the whole parameter, at the cut."""
    reader = node
    name = named(value)
    if name is not None and name.entry is not None and name.entry.op.name == "slice":
        index = value.args[1] if len(value.args) > 1 else None
        source = value.args[0]
        if isinstance(index, slice) and isinstance(source, fx.Node) and source.op == "get_attr" and op.weight_axis == 0:
            reader, slot, value = value, Slot(0), source
    site = site_of(value)
    if site is None:
        return None
    return Weight(site, op.weight_axis, op.block_axis, slot=slot, value=value, reader=reader)


def _behind(node: fx.Node, place: Place) -> fx.Node:
    """The value behind the activations that disappear into the kernel."""
    at, left = node, list(place.fuses)
    while len(at.users) == 1:
        reader = next(iter(at.users))
        name = named(reader)
        if name is None or name.entry is None or name.entry.op.name not in left:
            break
        if reader.args[:1] != (at,) or not _bounds(reader, name.entry.op.name):
            break
        at = reader
        if name.entry.op.name != "batch_norm":
            break
        left.remove("batch_norm")
    return at


def bound_of(model: fx.GraphModule, node: fx.Node) -> Bound:
    """What the activation at `node` promises of its values."""
    op = op_of(node)
    if op == "relu":
        return (0.0, None)
    if op == "relu6":
        return (0.0, 6.0)
    if op != "clamp":
        return (None, None)
    module = model.get_submodule(str(node.target))
    given = dict(zip(("input", "min", "max"), node.args, strict=False)) | node.kwargs
    ends = [getattr(module, f"{end}_val", given.get(end, given.get(f"{end}_val"))) for end in ("min", "max")]
    low, high = (float(end) if isinstance(end, (int, float)) else None for end in ends)
    return (low, high) if (low or 0.0) <= 0.0 <= (high or 0.0) else (None, None)


def _bounds(node: fx.Node, op: str) -> bool:
    """False for a clamp to a tensor's values, which no pair can take in."""
    return op != "clamp" or all(not isinstance(arg, fx.Node) for arg in (*node.args[1:], *node.kwargs.values()))


def _moves_nothing(model: fx.GraphModule, node: fx.Node, op: str) -> bool:
    """True for resizing to the nearest value, which stays on its level."""
    if op != "interpolate":
        return False
    module: nn.Module | None = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    mode = getattr(module, "mode", None) or node.kwargs.get("mode", "nearest")
    return str(mode).startswith("nearest")
